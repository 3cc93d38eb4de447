"""The key table: which blocks hold the content that a key names."""

from __future__ import annotations

from typing import TypeAlias

from reference.keys.views import Chain

Key: TypeAlias = tuple[int, Chain]
"""A group, and the prefix whose last block, in that group, is named."""


class KeyTable:
    """Blocks registered under each key, oldest first.

    Duplicates are kept apart, never merged: two requests that compute the same prefix at once both keep their block and
    both are registered; a lookup gives the older. vLLM 0.33 `BlockHashToBlockMap`.
    """

    def __init__(self) -> None:
        self._blocks: dict[Key, dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._blocks)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def first(self, key: Key) -> int | None:
        """The block that has been under `key` for longest, or None."""
        blocks = self._blocks.get(key)
        return None if blocks is None else next(iter(blocks))

    def has(self, key: Key, block: int) -> bool:
        """True if `block` is registered under `key`."""
        return block in self._blocks.get(key, ())

    def insert(self, key: Key, block: int) -> bool:
        """Register `block` under `key`, after those already there; False when it is one of them."""
        blocks = self._blocks.get(key)
        if blocks is None:
            self._blocks[key] = {block: None}
            return True
        if block in blocks:
            return False
        blocks[block] = None
        return True

    def remove(self, key: Key, block: int) -> None:
        """Take `block`, and only it, away from `key`, under which it is registered."""
        blocks = self._blocks[key]
        del blocks[block]
        if not blocks:
            del self._blocks[key]

    def clear(self) -> None:
        """Forget every key."""
        self._blocks.clear()

"""A request's keys as a group with larger blocks sees them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias, overload

Chain: TypeAlias = Hashable
"""Name of a whole prefix: the chain hash of its last hash block, or the int that a request trace gives for it."""


class BlockKeys(Sequence[Chain]):
    """The keys of whole blocks: of each block, the last fine key inside it, which covers the whole prefix.

    vLLM 0.33 `resolve_block_hashes` and `BlockHashListWithBlockSize`. Keys are not concatenated: since they are
    chained, the last one names everything before it.

    Args:
      keys: one key for each hash block; the view follows it as it grows.
      scale: hash blocks per block.
    """

    __slots__ = ("_keys", "_scale")

    def __init__(self, keys: Sequence[Chain], scale: int) -> None:
        self._keys = keys
        self._scale = scale

    def __len__(self) -> int:
        return len(self._keys) // self._scale

    @overload
    def __getitem__(self, index: int) -> Chain: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chain]: ...
    def __getitem__(self, index: int | slice) -> Chain | list[Chain]:
        if isinstance(index, slice):
            return [self[column] for column in range(*index.indices(len(self)))]
        return self._keys[(index + 1) * self._scale - 1]


def block_keys(keys: Sequence[Chain], hash_block_size: int, block_size: int) -> Sequence[Chain]:
    """The keys of blocks of `block_size` tokens, a multiple of `hash_block_size`, given those of hash blocks."""
    if block_size == hash_block_size:
        return keys
    return BlockKeys(keys, block_size // hash_block_size)

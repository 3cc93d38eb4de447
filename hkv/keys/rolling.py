"""Rolling prefix keys: one signed 64-bit hash that runs over all tokens, read at every block's end.

Host-only. The scheme is RTP-LLM's (main branch, August 2026: `initCacheKeys`, `updateCacheKeys` and
`dropLastPartialBlock`), bit by bit. It has no seed and no protection against tokens that were chosen to collide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.errors import OperationError

MIX = 0x9E3779B97F4A7C15
"""Constant added for every token, besides the token itself."""

_MASK = (1 << 64) - 1
_INT32 = 1 << 31


@dataclasses.dataclass(frozen=True)
class RollingKeys:
    """The keys of one sequence: the int64 hash after each block, of which the last may be partly filled.

    `aligned` says that every key stands for a whole block.
    """

    keys: tuple[int, ...] = ()
    aligned: bool = True

    def without_partial(self) -> RollingKeys:
        """The keys of whole blocks alone (`dropLastPartialBlock`)."""
        return self if self.aligned else RollingKeys(self.keys[:-1], True)


def roll(tokens: Sequence[int], start: int = 0) -> int:
    """The int64 hash after more int32 tokens, `start` being the hash before them.

    Each token is sign-extended, and the hash is shifted right arithmetically: its sign bit comes along.
    """
    value = start
    for token in tokens:
        if not -_INT32 <= token < _INT32:
            raise OperationError("tokens", token, "int32 values")
        value = _signed(value ^ (token + MIX + (value << 12) + (value >> 32)))
    return value


def first_keys(tokens: Sequence[int], block_size: int) -> RollingKeys:
    """The keys of a sequence that has none yet, its last, partly filled block included."""
    keys: list[int] = []
    for start in range(0, len(tokens), _positive(block_size)):
        keys.append(roll(tokens[start : start + block_size], keys[-1] if keys else 0))
    return RollingKeys(tuple(keys), len(tokens) % block_size == 0)


def next_keys(known: RollingKeys, tokens: Sequence[int], block_size: int) -> RollingKeys:
    """The keys of a sequence that grew: those of whole blocks only, for it will grow again.

    `tokens` is the whole sequence; OperationError where it became shorter than its keys.
    """
    keys = list(known.without_partial().keys)
    if len(keys) * _positive(block_size) > len(tokens):
        raise OperationError("tokens", len(tokens), f"at least the {len(keys) * block_size} tokens that have keys")
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        keys.append(roll(tokens[start : start + block_size], keys[-1] if keys else 0))
    return RollingKeys(tuple(keys), True)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _positive(block_size: int) -> int:
    if type(block_size) is not int or block_size < 1:
        raise OperationError("block_size", block_size, "a positive number of tokens")
    return block_size

"""The twin of `hkv.keys.fingerprint`: the same keys in plain integers, one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORD = 0xFFFFFFFF

ROOT = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
"""Parent key of the first block."""

MULTIPLIERS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
ADDENDS = (0x561CCD1B, 0x0BCAA747, 0x96CD1C35, 0x32AC3B17)
INNER, OUTER = (15, 16, 17, 18), (19, 17, 15, 13)


def keys(tokens: np.ndarray, parent: Sequence[int] = ROOT) -> np.ndarray:
    """The keys of consecutive blocks of one request.

    Args:
      tokens: integers [blocks, block size], each taken modulo 2**32.
      parent: four words, the key of the block before them.

    Returns:
      uint32[blocks, 4].
    """
    chained = np.zeros((len(tokens), 4), np.uint32)
    key = [int(word) for word in parent]
    for row, block in enumerate(tokens):
        absorb(key, digest([int(token) & WORD for token in block]))
        finish(key)
        chained[row] = key
    return chained


def ahead(link: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The key of a block that covers the tokens `after` it as well, from its key without them, its `link`."""
    key = [int(word) for word in link]
    padded = [int(token) & WORD for token in after] + [0] * (-len(after) % 4)
    for start in range(0, len(padded), 4):
        absorb(key, padded[start : start + 4])
    if padded:
        finish(key)
    return tuple(key)


def digest(block: Sequence[int]) -> list[int]:
    """The digest of one block by itself."""
    state = [len(block)] * 4
    padded = [*block, *[0] * (-len(block) % 4)]
    for start in range(0, len(padded), 4):
        absorb(state, padded[start : start + 4])
    finish(state)
    return state


def absorb(state: list[int], words: Sequence[int]) -> None:
    """Mixes four words into a state."""
    for i in range(4):
        word = words[i] * MULTIPLIERS[i] & WORD
        word = rotate(word, INNER[i]) * MULTIPLIERS[(i + 1) % 4] & WORD
        mixed = rotate(state[i] ^ word, OUTER[i]) + state[(i + 1) % 4]
        state[i] = (mixed * 5 + ADDENDS[i]) & WORD


def finish(state: list[int]) -> None:
    """Makes every bit of a state depend on all of it."""
    spread(state)
    for i in range(4):
        word = state[i]
        word = (word ^ word >> 16) * 0x85EBCA6B & WORD
        word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
        state[i] = word ^ word >> 16
    spread(state)


def spread(state: list[int]) -> None:
    """Adds all words into the first, and that into the others."""
    state[0] = sum(state) & WORD
    for i in range(1, 4):
        state[i] = (state[i] + state[0]) & WORD


def rotate(word: int, by: int) -> int:
    """A 32-bit word, rotated to the left."""
    return (word << by | word >> (32 - by)) & WORD

"""Numbers as vLLM's ARC computes its target, in doubles, by words of int32: a whole number, and twice 26 bits behind
the point, of which every double that the target can be is a multiple.

Numbers are below 2**24 and not negative. Each step is rounded as a double is.
"""

from __future__ import annotations

from typing import TypeAlias

from reference.language import Text

TEXT = Text(__name__)

HALF, LOW = 26, (1 << 26) - 1
"""Bits of a word behind the point, and all of them."""

Double: TypeAlias = tuple[int, int, int]
"""Whole, and the words behind the point, the higher one first."""


def rounded(whole: int, high: int, low: int, rest: int, of: int) -> Double:
    """The double next to a number and `rest / of` of its last bit; of two as near, the even one."""
    bits = 0
    while whole >> (bits + 1) > 0:
        bits += 1
    if bits == 0:
        cut, half, rises = 2 * rest, of, low & 1
    else:
        cut, half, rises = low & ((1 << bits) - 1), 1 << (bits - 1), (low >> bits) & 1
        low -= cut
    if cut > half or (cut == half and (rises or (bits > 0 and rest > 0))):
        low += 1 << bits
    high += low >> HALF
    return whole + (high >> HALF), high & LOW, low & LOW


def at_least_one(a: int, b: int) -> Double:
    """`max(1, a / b)`."""
    if a <= b:
        return 1, 0, 0
    high, low, rest = 0, 0, a % b
    for at in range(2 * HALF):
        rest *= 2
        bit = int(rest >= b)
        rest -= bit * b
        if at < HALF:
            high = 2 * high + bit
        else:
            low = 2 * low + bit
    return rounded(a // b, high, low, rest, b)


def added(a: Double, b: Double, most: int) -> Double:
    """`min(a + b, most)`."""
    low = a[2] + b[2]
    high = a[1] + b[1] + (low >> HALF)
    total = rounded(a[0] + b[0] + (high >> HALF), high & LOW, low & LOW, 0, 1)
    return total if total[0] < most else (most, 0, 0)


def less(a: Double, b: Double) -> Double:
    """`max(a - b, 0)`."""
    low = a[2] - b[2]
    high = a[1] - b[1] + (low >> HALF)
    whole = a[0] - b[0] + (high >> HALF)
    if whole < 0:
        return 0, 0, 0
    return rounded(whole, high & LOW, low & LOW, 0, 1)

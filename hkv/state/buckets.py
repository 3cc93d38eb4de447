"""Checks of buckets: the static sizes of a state's arrays, from which programs are compiled.

Each arrangement of mechanisms has its own record of them (`hkv.state.state.Buckets`, `hkv.state.pooled.PooledBuckets`);
what is asked of a size is the same in all. Arrays are addressed flat, by int32, and a
few additions to an index must not overflow: hence the limit of `MOST`, a half of what the sign bit would leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hkv.errors import ConfigError

MOST = 1 << 30
"""Elements that no array of a state reaches."""


def require_positive(buckets: Any, zero: Collection[str] = ()) -> None:
    """Raises ConfigError unless every field is a positive integer; those named in `zero` may be 0."""
    for name, value in vars(buckets).items():
        if type(value) is not int or value < (name not in zero):
            raise ConfigError(name, value, "a non-negative integer" if name in zero else "a positive integer")


def require_addressable(buckets: Any, arrays: Mapping[str, int]) -> None:
    """Raises ConfigError for a large array of `MOST` elements; `arrays` has them by the size that one would lower."""
    for name, elements in arrays.items():
        if elements >= MOST:
            raise ConfigError(name, getattr(buckets, name), "fewer, so that the array has less than 2**30 elements")


def require_growth(old: Any, new: Any, growing: Iterable[str]) -> None:
    """Raises ConfigError for a size of `growing` that is smaller in `new`, or any other that differs."""
    for name, before in vars(old).items():
        after = getattr(new, name)
        if name in growing and after < before:
            raise ConfigError(name, after, f"at least {before}")
        if name not in growing and after != before:
            raise ConfigError(name, after, f"{before}, as before")

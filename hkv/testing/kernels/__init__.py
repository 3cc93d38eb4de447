"""Kernels held to the definition: any function that writes, gathers, copies, zeros, packs or attends, byte for byte.

- `kernel`: decorator that declares what a function does and supports; `Supports` has the same as fields;
- `assert_writes_like`: raises where a kernel and the definition, or two kernels, leave different bytes;
- `assert_viewed_as`: raises where a tensor's shape and strides are not those of the layout that it is said to have;
- `target_of`, `check`, `repeat`: what `hkv check-kernel` is made of; `Verdict` and `Failure`, which they give.

`docs/check-kernel.md` shows them, and names all arguments that a kernel can ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader

if TYPE_CHECKING:
    from hkv.testing.kernels.asserting import assert_viewed_as, assert_writes_like
    from hkv.testing.kernels.cases import Case, Supports
    from hkv.testing.kernels.judge import Failure, Verdict, check, repeat
    from hkv.testing.kernels.placement import Placement, place
    from hkv.testing.kernels.targets import Target, kernel, target_of

__all__ = [
    "Case",
    "Failure",
    "Placement",
    "Supports",
    "Target",
    "Verdict",
    "assert_viewed_as",
    "assert_writes_like",
    "check",
    "kernel",
    "place",
    "repeat",
    "target_of",
]

__getattr__ = loader(
    __name__,
    {
        "hkv.testing.kernels.asserting": "assert_viewed_as assert_writes_like",
        "hkv.testing.kernels.cases": "Case Supports",
        "hkv.testing.kernels.judge": "Failure Verdict check repeat",
        "hkv.testing.kernels.placement": "Placement place",
        "hkv.testing.kernels.targets": "Target kernel target_of",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Latter half: a query at n reads [n / 2, n), so that its lookback grows with the length. A kind of no engine."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatterHalf(AttentionSpec):
    """A layer whose queries read the latter half of what precedes them."""

    kind: ClassVar[str] = "latter_half"
    written: ClassVar[Written] = Written("latter_half")

    def readable(self, n: int) -> range:
        return range(n // 2, n)

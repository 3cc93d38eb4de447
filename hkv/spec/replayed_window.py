"""Latent window that is never cached: after a hit, the window before its end is computed again."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.spec.layer import Written
from hkv.spec.sliding_window_mla import SlidingWindowMLA


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedWindow(SlidingWindowMLA):
    """A latent sliding-window layer under bounded replay (vLLM 0.33 `SlidingWindowMLASpec.bounded_replay`).

    Its blocks are never shared. A request that resumes behind a hit gets blocks for the window before the hit's end,
    and its scheduler has those tokens computed once more, whose values in other groups stay as they are.
    """

    kind: ClassVar[str] = "replayed_window"
    written: ClassVar[Written] = Written(
        "replayed", ("window",), ("extra_retained_tokens",), seldom=("extra_retained_tokens",)
    )
    prefix_cacheable: ClassVar[bool] = False
    replays: ClassVar[bool] = True

"""The defects of vLLM 0.33's planning, each in the smallest set of layers that shows it: the contract, then the defect.

Example:
  python docs/upstream-bugs/planning.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hkv.dialects.vllm.kinds import layer_class
from hkv.dialects.vllm.planning.pages import unify_pages
from hkv.dialects.vllm.planning.plan import Plan, PlanOptions
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.errors import HKVError
from hkv.spec import FullAttention, LayerSpec, MLAAttention, RequestLimits, SlidingWindow, SlidingWindowMLA

Layers = dict[str, LayerSpec]
Bugs = frozenset[str]

FULL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)
NARROW = dataclasses.replace(FULL, head_size=8)
WINDOW = SlidingWindow(block_size=16, num_kv_heads=2, head_size=64, window=40)
LATENT = MLAAttention(block_size=16, head_size=576)
LIMITS = RequestLimits(max_model_len=1000, max_in_flight_tokens=100)


def groups(stages: Sequence[Layers], bugs: Bugs, layout: str = "LBNHC", hybrid: bool = True) -> str:
    """The layers of each group, as planned."""
    made = _plan(stages, bugs, layout, hybrid)
    return "groups " + " | ".join("+".join(group.names) for group in made.groups)


def _plan(stages: Sequence[Layers], bugs: Bugs, layout: str, hybrid: bool) -> Plan:
    options = PlanOptions(limits=LIMITS, layout=layout, hybrid=hybrid, bugs=bugs)
    return plan_vllm(list(stages), [1 << 26] * len(stages), options)


def window_sizes(bugs: Bugs) -> str:
    """Two window sizes, and the hybrid manager off."""
    other = dataclasses.replace(WINDOW, window=80)
    return groups([{"full": FULL, "window 40": WINDOW, "window 80": other}], bugs, hybrid=False)


def latent_merge(bugs: Bugs) -> str:
    """Latent window layers of two head sizes."""
    small = SlidingWindowMLA(block_size=4, head_size=64, window=8, quantization="fp8_per_tensor")
    merged = layer_class(SlidingWindowMLA).merge([small, dataclasses.replace(small, head_size=128)], bugs)
    assert isinstance(merged, SlidingWindowMLA)
    return f"one group of head size {merged.head_size}, quantization {merged.quantization}"


def packed_split(bugs: Bugs) -> str:
    """Pages of several sizes in a layout that packs them side by side."""
    wide = dataclasses.replace(WINDOW, num_kv_heads=4)
    narrow = {f"narrow{i}": WINDOW for i in range(5)}
    return groups([{"full": FULL, "wide": wide, **narrow}], bugs, layout="BLHNC")


def absent_layers(bugs: Bugs) -> str:
    """Two pipeline stages; the second has no layer of a group of mixed pages."""
    first: Layers = {"full": FULL, "narrow": NARROW, "window0": WINDOW}
    made = _plan([first, {"window1": WINDOW}], bugs, "BLHNC", True)
    return f"tensors of stage 1: {', '.join(name for t in made.workers[1].tensors for name in t.layers)}"


def latent_promotion(bugs: Bugs) -> str:
    """A latent window layer beside latent layers, and the hybrid manager off."""
    window = SlidingWindowMLA(block_size=16, head_size=576, window=40)
    return groups([{"latent": LATENT, "latent window": window}], bugs, hybrid=False)


def stale_padding(bugs: Bugs) -> str:
    """A padded page, half as large as the others."""
    padded = dataclasses.replace(WINDOW, num_kv_heads=1, head_size=32, page_size_padded=4096)
    unified = unify_pages({"full": FULL, "padded": padded}, bugs)["padded"]
    return f"blocks of {unified.block_size} tokens in pages of {unified.page_size_bytes} bytes"


def scattered_heads(bugs: Bugs) -> str:
    """Pages of two heads that are aligned as a whole, in the order that stores head after head."""
    aligned = dataclasses.replace(FULL, block_stride_alignment=8192)
    made = _plan([{"full": aligned}], bugs, "LHBNC", True)
    return f"blocks {made.workers[0].tensors[0].block_stride} bytes apart, aligned to {aligned.block_stride_alignment}"


CASES: dict[str, Callable[[Bugs], str]] = {
    "window-sizes-abort-grouping": window_sizes,
    "window-latent-merge": latent_merge,
    "packed-split-loses-layers": packed_split,
    "absent-layers-get-tensors": absent_layers,
    "latent-window-promotion": latent_promotion,
    "stale-page-padding": stale_padding,
    "scattered-heads-unaligned": scattered_heads,
}


def told(case: Callable[[Bugs], str], bugs: Bugs) -> str:
    """Result of a case, or its error."""
    try:
        return case(bugs)
    except HKVError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Prints every case twice."""
    for name, case in CASES.items():
        print(f"{name}\n  contract: {told(case, frozenset())}\n  defect:   {told(case, frozenset({name}))}")


if __name__ == "__main__":
    main()

"""Figures of a run, as data, as lines and as a drawing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from examples.hybrid_decoder.loop import COUNTS
from examples.hybrid_decoder.serving import Decoder
from hkv.cache.state import StepCounter
from hkv.oracle.atomic import write_atomically
from hkv.spec import FullAttention

LABELS = {
    "full": "full attention",
    "window": "sliding window",
    "chunked": "chunked local",
    "mla": "latent (MLA)",
    "delta": "gated delta",
}


def figures(decoder: Decoder, seconds: float, compiling: float) -> dict[str, Any]:
    """Figures of a run. Memory is in bytes, counted at the turn in which the cache held most blocks.

    Args:
      decoder: after its run.
      seconds: that serving took, without compiling.
      compiling: seconds.
    """
    model, carry = decoder.model, decoder.carry
    counts = dict(zip(COUNTS, np.asarray(carry.counts).tolist(), strict=True))
    asked = max(decoder.asked, 1)
    held = np.asarray(carry.held).tolist()
    layers = {kind: model.layers.count(kind) for kind in model.kinds}
    pages = zip(model.kinds, held, strict=True)
    bytes_of = {kind: blocks * decoder.page_bytes * layers[kind] for kind, blocks in pages}
    heads = {"num_kv_heads": model.kv_heads, "head_size": model.head, "dtype": "float32"}
    full_page = FullAttention(block_size=model.block, **heads).page_size_bytes
    return {
        **counts,
        "seconds": seconds,
        "compiling_seconds": compiling,
        "tokens_per_second": counts["tokens"] / seconds if seconds else 0.0,
        "prompt_tokens": decoder.asked,
        "hit_rate": decoder.adopted / asked,
        "hit_rate_alone": dict(zip(model.kinds, (decoder.found / asked).tolist(), strict=True)),
        "evictions": int(carry.cache.counters[StepCounter.EVICTIONS]),
        "bytes": bytes_of,
        "bytes_with_full_attention": int(carry.most[1]) * full_page * len(model.layers),
        "layers": layers,
    }


def lines(found: dict[str, Any], audited: bool) -> list[str]:
    """The figures for people."""
    used, whole = sum(found["bytes"].values()), found["bytes_with_full_attention"]
    shown = [
        f"{found['tokens']} tokens in {found['seconds']:.2f} s: {found['tokens_per_second']:,.0f} a second"
        f" (compiling took {found['compiling_seconds']:.0f} s before)",
        f"{found['turns']} turns of the loop; {found['accepted']} of {found['drafted']} drafts stayed; "
        f"{found['preempted']} preemptions; {found['evictions']} evictions",
        f"found in the cache: {found['hit_rate']:.0%} of {found['prompt_tokens']} tokens that arrived",
    ]
    for kind, rate in found["hit_rate_alone"].items():
        size = found["bytes"][kind] / 1024
        shown.append(f"  {LABELS[kind]:15} {found['layers'][kind]} layers   alone {rate:4.0%}   {size:7.0f} KiB")
    shown.append(f"memory: {used / 1024:.0f} KiB; with full attention in every layer {whole / 1024:.0f} KiB")
    if audited:
        shown.append(f"reads of a wrong or freed slot: {found['wrong']}")
    if "largest_difference_ulps" in found:
        ulps = found["largest_difference_ulps"]
        shown.append(f"largest difference of a logit from the pass without a cache: {ulps:.3g} units in the last place")
    return shown


def draw(found: dict[str, Any], path: str) -> None:
    """Hit rates and memory of each kind, as a PNG or SVG file.

    Raises:
      FileError: it cannot be written there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    kinds = list(found["hit_rate_alone"])
    names = [LABELS[kind] for kind in kinds]
    rates = [100 * found["hit_rate_alone"][kind] for kind in kinds]
    colours = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377"][: len(kinds)]
    bars = left.barh(names, rates, color=colours)
    left.bar_label(bars, fmt="%.0f %%", padding=3)
    left.axvline(100 * found["hit_rate"], color="black", linestyle="--", linewidth=1)
    left.set(xlim=(0, 115), xlabel="% of arriving tokens", title="Found by each group alone (dashed: by all)")
    left.invert_yaxis()
    start = 0.0
    for kind, name, colour in zip(kinds, names, colours, strict=True):
        size = found["bytes"][kind] / 1024
        right.barh(["hybrid"], [size], left=start, color=colour, label=name)
        start += size
    right.barh(["full attention\neverywhere"], [found["bytes_with_full_attention"] / 1024], color="#bbbbbb")
    right.set(xlabel="KiB held at the peak", title=f"{found['tokens_per_second']:,.0f} tokens a second")
    right.invert_yaxis()
    total, whole = sum(found["bytes"].values()) / 1024, found["bytes_with_full_attention"] / 1024
    for row, size in enumerate((total, whole)):
        right.annotate(f"{size:,.0f}", (size, row), xytext=(4, 0), textcoords="offset points", va="center")
    right.set_xlim(0, 1.15 * whole)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.rpartition(".")[2], dpi=150)
    write_atomically(path, drawn.getvalue())

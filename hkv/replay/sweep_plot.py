"""Draws hit rates against the size of the pool, a line an option."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.plot_path import check_plot_path
from hkv.replay.sweep import MEMORY, OPTIMAL, Row, lines, optimal_rate, refused, size_of

OPTIMAL_LABEL, INFINITE_LABEL = "at most, by any choice of evictions", "a pool that evicts nothing"


def drawn(rows: Sequence[Row], path: str, title: str, infinite: Mapping[str, Row] | None = None) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for; SVG for `-`."""
    check_plot_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panel: Any = figure.subplots()
    by_memory = MEMORY in rows[0]["options"]
    scale = 2**30 if by_memory else 1
    for name, line in lines(rows).items():
        sizes = [size_of(row["options"]) / scale for row in line]
        (drawn_line,) = panel.plot(sizes, [100 * row["hit_rate"] for row in line], marker="o", markersize=4)
        drawn_line.set_label(name or "as replayed")
        colour = drawn_line.get_color()
        for size, row in zip(sizes, line, strict=True):
            if refused(row):
                at = (size, 100 * row["hit_rate"])
                panel.plot(*at, marker="o", markersize=7, markerfacecolor="white", color=colour)
                panel.annotate(f"{refused(row):,} refused", at, (4, 6), textcoords="offset points", fontsize=8)
        if OPTIMAL in line[0]:
            panel.plot(
                sizes, [100 * optimal_rate(row) for row in line], color=colour, linestyle=":", label=OPTIMAL_LABEL
            )
        if infinite and name in infinite:
            panel.axhline(100 * infinite[name]["hit_rate"], color=colour, linestyle="--", label=INFINITE_LABEL)
    panel.set_xscale("log")
    panel.set_xticks(_apart(sorted({size_of(row["options"]) / scale for row in rows})))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter("{x:,.4g}" if by_memory else "{x:,.0f}")
    panel.set_xlabel("memory for the cache (GiB)" if by_memory else "blocks in the pool")
    panel.set_ylabel("hit rate (% of prompt tokens)")
    panel.set_ylim(bottom=0)
    panel.grid(True, which="both", color="#e3e6e8", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    if len(lines(rows)) > 1 or OPTIMAL in rows[0] or infinite:
        panel.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path == "-" else pathlib.Path(path).suffix[1:].lower(), dpi=130)
    return buffer.getvalue()


def _apart(sizes: Sequence[float], most: int = 10) -> list[float]:
    """Sizes for the ticks of a logarithmic axis: those that leave room for a number between them."""
    kept = [sizes[0]]
    for size in sizes:
        if size >= kept[-1] * (sizes[-1] / sizes[0]) ** (1 / most) and size > kept[-1]:
            kept.append(size)
    return kept

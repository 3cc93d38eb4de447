"""Draws replays beside each other: hit rates as the trace goes on, and what became of the prompt tokens."""

from __future__ import annotations

import io
import pathlib
from typing import Any

import numpy as np

from hkv.plot_path import check_plot_path
from hkv.replay.compare import CompareResult
from hkv.replay.plot import PALETTE, grouped_causes


def drawn(result: CompareResult, path: str, title: str) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for; SVG for `-`."""
    check_plot_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_rates(panels[0], result)
    _draw_causes(panels[1], result)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path == "-" else pathlib.Path(path).suffix[1:].lower(), dpi=130)
    return buffer.getvalue()


def _draw_rates(panel: Any, result: CompareResult) -> None:
    prompts = result.requests["prompt"].astype(float)
    for name in result.names:
        hits = result.requests[name]
        there = hits >= 0
        so_far = np.cumsum(np.where(there, prompts, 0))
        rate = 100 * np.cumsum(np.where(there, hits, 0)) / np.maximum(so_far, 1)
        panel.plot(np.arange(1, len(rate) + 1), rate, label=name)
    panel.set_xlabel("requests of the trace")
    panel.set_ylabel("hit rate so far (% of prompt tokens)")
    panel.set_ylim(bottom=0)
    panel.grid(True, color="#e3e6e8", linewidth=0.8)
    panel.legend(frameon=False)


def _draw_causes(panel: Any, result: CompareResult) -> None:
    places, left = np.arange(len(result.names)), np.zeros(len(result.names))
    parts = {"hit": result.causes["hit"], **grouped_causes(result.causes)}
    whole = np.maximum(np.sum(list(parts.values()), axis=0), 1)
    for (name, tokens), colour in zip(parts.items(), PALETTE, strict=False):
        share = 100 * tokens / whole
        if share.any():
            panel.barh(places, share, left=left, color=colour, label=name)
            left = left + share
    panel.set_yticks(places, [f"{place + 1}" for place in places])
    panel.set_ylabel("replay")
    panel.invert_yaxis()
    panel.set_xlabel("prompt tokens (%)")
    panel.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)

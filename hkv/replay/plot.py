"""Draws a replay over time, replays side by side, and hit rates against the size of the pool."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hkv.columns import Columns
from hkv.contract.options import check_plot_path
from hkv.replay.attribution import BLOCK, CAUSES, DRAFT, FIRST_USE, LAST_TOKEN, TRACE, UNIT
from hkv.replay.compare import CompareResult
from hkv.replay.observed import EVICTED, NOT_RETAINED, Occupancy, OccupancyKind
from hkv.replay.result import totals
from hkv.replay.run import Outcome
from hkv.replay.sweep import MEMORY, OPTIMAL, TIER, Row, lines, optimal_rate, refused, size_name, size_of, tier_size
from hkv.spec import spec_to_text

HIT, CUMULATIVE, BLOCKS, WAITING, RUNNING = "#2a7f9e", "#12313d", "#7a9e3f", "#c8553d", "#5a6c75"


PALETTE = ("#2a7f9e", "#c9ced1", "#e8d9a8", "#c8553d", "#7a4f9e", "#7a9e3f", "#5a6c75")
"""Of hits and of `SHOWN`, in order."""

SHOWN = {
    "first use": (FIRST_USE,),
    "not in the trace": (TRACE,),
    "evicted": (EVICTED,),
    "not retained": (NOT_RETAINED,),
    "blocks, units, draft": (LAST_TOKEN, BLOCK, UNIT, DRAFT),
}
"""Causes that are drawn together, by what they are called; the rest is called so."""


def drawn(outcome: Outcome, path: str, step_ms: int, title: str, bins: int = 240) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for."""
    figure = _figure((10, 10), path)
    panels: Any = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 3, 2))
    scale, unit = _time_unit(outcome.steps * step_ms / 1000)
    edges = np.linspace(0, outcome.steps, min(bins, max(outcome.steps, 1)) + 1)
    times = (edges[:-1] + edges[1:]) / 2 * step_ms / 1000 / scale
    _draw_hits(panels[0], outcome, edges[:: len(edges) // 60 or 1], step_ms / 1000 / scale)
    _draw_causes(panels[1], outcome, edges[:: len(edges) // 60 or 1], step_ms / 1000 / scale)
    _draw_blocks(panels[2], outcome, edges, times)
    _draw_requests(panels[3], outcome, edges, times)
    panels[3].set_xlabel(f"time ({unit})")
    panels[3].set_xlim(0, outcome.steps * step_ms / 1000 / scale)
    for panel in panels:
        panel.grid(True, color="#e3e6e8", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return _saved(figure, path, title)


def _draw_hits(panel: Any, outcome: Outcome, edges: np.ndarray, per_step: float) -> None:
    steps = outcome.recorder.steps
    edges = np.append(edges[edges < outcome.steps], outcome.steps)
    prompt = np.histogram(steps.step, edges, weights=np.asarray(steps.prompt_tokens, float))[0]
    hit = np.histogram(steps.step, edges, weights=np.asarray(steps.hit_tokens, float))[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        here, so_far = 100 * hit / prompt, 100 * np.cumsum(hit) / np.cumsum(prompt)
    rate = totals(outcome)["hit_rate"]
    label = f"in each 1/{len(here)} of the time"
    # One patch for all stretches of time: as bars they would take longer to draw than the replay.
    panel.stairs(here, edges * per_step, fill=True, color=HIT, alpha=0.4, label=label)
    panel.plot(edges[1:] * per_step, so_far, color=CUMULATIVE, linewidth=2, label=f"so far (of all prompts {rate:.2%})")
    panel.set_ylabel("hit rate (% of prompt tokens)")
    panel.set_ylim(0, min(115, 1.3 * max(np.nanmax(here, initial=1), np.nanmax(so_far, initial=1))))
    panel.legend(loc="upper left", frameon=False, ncols=2)


def causes_over_time(outcome: Outcome, edges: np.ndarray) -> dict[str, np.ndarray]:
    """Prompt tokens first admitted between each two edges, in steps: hits, and the causes of `SHOWN`, by name."""
    found = outcome.missed.requests
    records = [outcome.recorder.requests[index] for index in sorted(outcome.recorder.requests)]
    admitted = np.array([record.admitted for record in records])
    there = admitted >= 0

    def over_time(tokens: np.ndarray) -> np.ndarray:
        return np.histogram(admitted[there], edges, weights=tokens[there].astype(float))[0]

    hits = np.array([record.hit if record.index >= outcome.warmup else 0 for record in records], np.int64)
    return {"hit": over_time(hits), **{name: over_time(tokens) for name, tokens in grouped_causes(found).items()}}


def grouped_causes(columns: Columns) -> dict[str, np.ndarray]:
    """Columns of tokens by cause, summed as `SHOWN` has them together."""
    rest = set(CAUSES) - {cause for causes in SHOWN.values() for cause in causes}
    parts = {**SHOWN, "other": tuple(rest)}
    return {name: np.sum([columns[cause] for cause in causes], axis=0) for name, causes in parts.items()}


def _draw_causes(panel: Any, outcome: Outcome, edges: np.ndarray, per_step: float) -> None:
    edges = np.append(edges[edges < outcome.steps], outcome.steps)
    parts = causes_over_time(outcome, edges) if outcome.trace is not None else {}
    whole = np.sum(list(parts.values()), axis=0)
    bottom = np.zeros(len(edges) - 1)
    for (name, tokens), colour in zip(parts.items(), PALETTE, strict=False):
        if not tokens.any():
            continue
        share = 100 * tokens / np.maximum(whole, 1)
        panel.stairs(bottom + share, edges * per_step, baseline=bottom, fill=True, color=colour, label=name)
        bottom = bottom + share
    panel.set_ylabel("prompt tokens (%)")
    panel.set_ylim(0, 130)
    panel.set_yticks([0, 25, 50, 75, 100])
    if parts:
        panel.legend(loc="upper left", frameon=False, ncols=len(PALETTE))


def _draw_blocks(panel: Any, outcome: Outcome, edges: np.ndarray, times: np.ndarray) -> None:
    steps, capacity = outcome.recorder.steps, outcome.cache.blocks
    peak = _largest(steps.step, steps.in_use, edges)
    if outcome.occupancy is None:
        panel.fill_between(times, peak, step="mid", color=BLOCKS, alpha=0.45, linewidth=0)
    else:
        _stack(panel, outcome, outcome.occupancy, (times[-1] + times[0]) / outcome.steps)
    panel.plot(times, peak, drawstyle="steps-mid", color=CUMULATIVE, linewidth=1.0, label="held at once (peak)")
    panel.axhline(capacity, color=WAITING, linestyle="--", linewidth=1.2, label=f"pool: {capacity:,} blocks")
    panel.set_ylabel("blocks")
    panel.set_ylim(0, capacity * 1.3)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.legend(loc="upper left", frameon=False, ncols=4)


def _stack(panel: Any, outcome: Outcome, occupancy: Occupancy, per_step: float) -> None:
    """Blocks on top of each other, group by group: held and not cached, held and cached, cached and not held."""
    import matplotlib

    held, cached, evictable = (occupancy.blocks[kind] for kind in OccupancyKind)
    both = cached - evictable
    tones = {"held, not cached": (held - both, 1.0), "held and cached": (both, 0.6), "evictable": (evictable, 0.25)}
    colours = [matplotlib.colormaps["tab10"](place) for place in range(10)]
    times, bottom = (occupancy.steps + 1) * per_step, np.zeros(len(occupancy.steps))
    for blocks, alpha in tones.values():
        for group, line in enumerate(blocks):
            colour = colours[group % len(colours)]
            panel.fill_between(times, bottom, bottom + line, color=colour, alpha=alpha, linewidth=0)
            bottom = bottom + line
    for group, each in enumerate(outcome.cache.groups):
        panel.fill_between([], [], color=colours[group % len(colours)], label=spec_to_text(each.spec))
    for tone, (_, alpha) in tones.items():
        panel.fill_between([], [], color="#444444", alpha=alpha, linewidth=0, label=tone)


def _draw_requests(panel: Any, outcome: Outcome, edges: np.ndarray, times: np.ndarray) -> None:
    steps = outcome.recorder.steps
    running, waiting = _largest(steps.step, steps.running, edges), _largest(steps.step, steps.waiting, edges)
    preempted = np.histogram(steps.step, edges, weights=np.asarray(steps.preemptions, float))[0]
    panel.plot(times, running, color=RUNNING, linewidth=1.3, label="running (peak)")
    panel.plot(times, waiting, color=WAITING, linewidth=1.3, label="waiting (peak)")
    if preempted.any():
        panel.bar(times, preempted, width=(times[1] - times[0]), color=HIT, alpha=0.5, label="preemptions")
    panel.set_ylabel("requests")
    top = max(running.max(initial=1), waiting.max(initial=1), preempted.max(initial=1))
    panel.set_ylim(0, 1.28 * top)
    panel.legend(loc="upper left", frameon=False, ncols=3)


def _largest(steps: Sequence[int], values: Sequence[int], edges: np.ndarray) -> np.ndarray:
    """The largest value between each two edges; 0 if none lies there."""
    largest = np.zeros(len(edges) - 1)
    place = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(largest) - 1)
    np.maximum.at(largest, place, np.asarray(values, float))
    return largest


def _time_unit(seconds: float) -> tuple[int, str]:
    if seconds > 7200:
        return 3600, "hours"
    return (60, "minutes") if seconds > 180 else (1, "seconds")


def drawn_comparison(result: CompareResult, path: str, title: str) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for; SVG for `-`."""
    figure = _figure((11, 5), path)
    panels: Any = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_rates(panels[0], result)
    _draw_shares(panels[1], result)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return _saved(figure, path, title)


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


def _draw_shares(panel: Any, result: CompareResult) -> None:
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


OPTIMAL_LABEL, INFINITE_LABEL = "at most, by any choice of what to keep", "a pool that evicts nothing"


AXES = {
    "memory": "memory for the cache (GiB)",
    "blocks": "blocks in the pool",
    "host memory": "second tier in host memory (GiB)",
    "chunks": "chunks in the second tier",
}


def drawn_sweep(
    rows: Sequence[Row],
    path: str,
    title: str,
    infinite: Mapping[str, Row] | None = None,
    cost_ratio: float | None = None,
    size: str | None = None,
) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for; SVG for `-`.

    Where nothing varies but the sizes of two tiers, several of each, both are axes, with lines of equal cost where
    `cost_ratio` of the second tier cost as much as one of the first.
    """
    if over_both(rows):
        return _drawn_tiers(rows, path, title, cost_ratio)
    figure = _figure((9, 5.5), path)
    from matplotlib.ticker import NullLocator

    panel: Any = figure.subplots()
    size = size or size_name(rows[0]["options"])
    by_memory = "memory" in size
    scale = 2**30 if by_memory else 1
    for name, each in lines(rows).items():
        line = [row for row in each if size_of(row["options"])]
        sizes = [size_of(row["options"]) / scale for row in line]
        (drawn_line,) = panel.plot(sizes, [100 * row["hit_rate"] for row in line], marker="o", markersize=4)
        drawn_line.set_label(name or "as replayed")
        colour = drawn_line.get_color()
        for row in each[: len(each) - len(line)]:
            panel.axhline(100 * row["hit_rate"], color=colour, linestyle="-.", label="no second tier")
        for place, row in zip(sizes, line, strict=True):
            if refused(row):
                at = (place, 100 * row["hit_rate"])
                panel.plot(*at, marker="o", markersize=7, markerfacecolor="white", color=colour)
                panel.annotate(f"{refused(row):,} refused", at, (4, 6), textcoords="offset points", fontsize=8)
        if OPTIMAL in rows[0]:
            panel.plot(
                sizes, [100 * optimal_rate(row) for row in line], color=colour, linestyle=":", label=OPTIMAL_LABEL
            )
        if infinite and name in infinite:
            panel.axhline(100 * infinite[name]["hit_rate"], color=colour, linestyle="--", label=INFINITE_LABEL)
    panel.set_xscale("log")
    panel.set_xticks(_apart(sorted({size_of(row["options"]) / scale for row in rows} - {0})))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter("{x:,.4g}" if by_memory else "{x:,.0f}")
    panel.set_xlabel(AXES[size])
    panel.set_ylabel("hit rate (% of prompt tokens)")
    panel.set_ylim(bottom=0)
    panel.grid(True, which="both", color="#e3e6e8", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    if len(panel.get_legend_handles_labels()[1]) > 1:
        panel.legend(frameon=False)
    return _saved(figure, path, title)


def over_both(rows: Sequence[Row]) -> bool:
    """True if nothing varies but the sizes of two tiers, several of each."""
    names = set(rows[0]["options"])
    return TIER in names and len(names) == 2 and 1 < len(lines(rows)) < len(rows)


def _drawn_tiers(rows: Sequence[Row], path: str, title: str, cost_ratio: float | None) -> bytes:
    """Hit rates over the first tier's size and the second's, as a table of colours with the rates in it."""
    figure = _figure((9, 5.5), path)
    panel: Any = figure.subplots()
    (first,) = set(rows[0]["options"]) - {TIER}
    across = list(dict.fromkeys(row["options"][first] for row in sorted(rows, key=lambda row: size_of(row["options"]))))
    up = list(dict.fromkeys(row["options"][TIER] for row in rows))
    rates = np.full((len(up), len(across)), np.nan)
    for row in rows:
        rates[up.index(row["options"][TIER]), across.index(row["options"][first])] = 100 * row["hit_rate"]
    drawn = panel.imshow(rates, origin="lower", aspect="auto", cmap="viridis")
    middle = (np.nanmin(rates) + np.nanmax(rates)) / 2
    for (y, x), rate in np.ndenumerate(rates):
        if not np.isnan(rate):
            panel.text(x, y, f"{rate:.1f}", ha="center", va="center", color="white" if rate < middle else "black")
    if cost_ratio is not None:
        _draw_costs(panel, [size_of({first: each}) for each in across], [tier_size(each) for each in up], cost_ratio)
    panel.set_xticks(range(len(across)), across)
    panel.set_yticks(range(len(up)), up)
    panel.set_xlabel("memory for the cache on each GPU" if first == MEMORY else AXES["blocks"])
    panel.set_ylabel("second tier in host memory" if first == MEMORY else AXES["chunks"])
    figure.colorbar(drawn, label="hit rate (% of prompt tokens)")
    return _saved(figure, path, title)


COST = "#e4572e"


def _draw_costs(panel: Any, across: Sequence[float], up: Sequence[float], ratio: float) -> None:
    """Lines of equal cost, each through a size of the first tier with the least of the second."""
    costs = np.array(across)[None, :] + np.array(up)[:, None] / ratio
    panel.contour(costs, levels=sorted(set(costs[0])), colors=COST, linestyles="--", linewidths=1.6)
    label = f"{ratio:g} of the second tier cost as much as one of the first"
    panel.plot([], [], color=COST, linestyle="--", label=f"equal cost, where {label}")
    panel.legend(handles=panel.get_lines(), frameon=False, loc="upper left", bbox_to_anchor=(0, 1.09))


def _apart(sizes: Sequence[float], most: int = 10) -> list[float]:
    """Sizes for the ticks of a logarithmic axis: those that leave room for a number between them."""
    kept = [sizes[0]]
    for size in sizes:
        if size >= kept[-1] * (sizes[-1] / sizes[0]) ** (1 / most) and size > kept[-1]:
            kept.append(size)
    return kept


def _figure(size: tuple[float, float], path: str) -> Any:
    check_plot_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, path: str, title: str) -> bytes:
    """The figure as PNG or SVG by the suffix of the path; SVG for `-`."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path == "-" else pathlib.Path(path).suffix[1:].lower(), dpi=130)
    return buffer.getvalue()

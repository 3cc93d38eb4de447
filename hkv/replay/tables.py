"""A replay's outcome as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from hkv.replay import result
from hkv.replay.attribution import TRACE, Missed
from hkv.replay.observed import EVICTED
from hkv.replay.result import Ceiling, advice
from hkv.replay.run import Outcome

BARS = "▁▂▃▄▅▆▇█"

UNBOUNDED = 10_000
"""Columns that are enough for any table."""


def tables(outcome: Outcome, engine: str, ceilings: Sequence[Ceiling] = ()) -> Iterator[RenderableType]:
    """The totals, why prompts were no hits, and blocks in use over time."""
    yield _totals(outcome, engine)
    yield _reasons(outcome, engine)
    if outcome.trace is not None:
        yield _missed(outcome)
        yield "".join(f"- {sentence}\n" for sentence in advice(outcome, ceilings))
    yield _occupancy(outcome)


def _totals(outcome: Outcome, engine: str) -> Table:
    totals = result.totals(outcome)
    table = Table(title="Replay", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("remark")
    rows: list[tuple[str, Any, str]] = [
        ("requests", totals["requests"], f"{totals['finished']:,} finished"),
        ("prompt tokens", totals["prompt_tokens"], ""),
        ("hit tokens", totals["hit_tokens"], ""),
        ("hit rate", f"{totals['hit_rate']:.2%}", _counted(outcome)),
        ("output tokens", totals["output_tokens"], ""),
        ("blocks in use, peak", totals["blocks_in_use_peak"], f"of {totals['blocks']:,}"),
        ("blocks in use, median", totals["blocks_in_use_median"], "over steps with work"),
        ("evictions", _or_unavailable(totals["evictions"], engine), "cached blocks handed out again"),
        ("admissions put off", totals["put_off"], "steps in which the first waiting request did not fit"),
        ("preemptions", totals["preemptions"], _recovery(totals["recovered_tokens"], totals["recomputed_tokens"])),
        ("refused: never fits", totals["never_fit"], "too large for the whole pool"),
        ("refused: too long", totals["too_long"], f"over {outcome.max_model_len:,} tokens"),
        ("running, peak", totals["running_peak"], "requests"),
        ("waiting, peak", totals["waiting_peak"], f"requests; {totals['wait_steps_median']:,} steps wait, median"),
        ("steps", totals["steps_with_work"], f"with work, of {totals['steps']:,}"),
        ("wall time", f"{totals['seconds']:.1f} s", f"engine {engine}"),
    ]
    own = outcome.cache.rows(totals)
    rows[7:7] = [(what, _or_unavailable(value, engine), remark) for what, value, remark in own]
    for what, value, remark in rows:
        table.add_row(what, f"{value:,}" if isinstance(value, int) else value, remark)
    return table


def _counted(outcome: Outcome) -> str:
    after = f", after {outcome.warmup:,} requests" if outcome.warmup else ""
    return f"of prompt tokens, at first admission{after}"


def _or_unavailable(value: int | None, engine: str) -> int | str:
    return f"{result.UNAVAILABLE}: {engine}" if value is None else value


def _recovery(recovered: int, recomputed: int) -> str:
    return f"{recovered:,} of {recomputed:,} tokens found again" if recomputed else ""


def _reasons(outcome: Outcome, engine: str) -> RenderableType:
    if not outcome.cache.reasons:
        return "What groups lacked: under these rules nothing tells\n"
    groups = result.groups(outcome)
    if not groups or groups[0]["reasons"] is None:
        return f"What groups lacked: {result.UNAVAILABLE}: {engine} (add --check, or use --engine numpy)\n"
    return _Reasons(groups, outcome.cache.reasons)


def _missed(outcome: Outcome) -> Table:
    """Every prompt token: a hit, or the cause for which it was none."""
    totals, found = result.totals(outcome), outcome.missed
    names = outcome.cache.group_names
    table = Table(title="Prompt tokens, and why they were no hits", title_justify="left")
    table.add_column("cause", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    table.add_column("remark")
    prompt = max(totals["prompt_tokens"], 1)
    rows = [("hit", totals["hit_tokens"], "")]
    rows += [(cause, tokens, _remark(cause, outcome, found, names)) for cause, tokens in found.tokens.items() if tokens]
    for cause, tokens, remark in rows:
        table.add_row(cause, f"{tokens:,}", f"{tokens / prompt:.2%}", remark)
    return table


def _remark(cause: str, outcome: Outcome, found: Missed, names: Sequence[str]) -> str:
    """The group that lacked blocks for most of it; for evictions, by whose pressure."""
    assert outcome.trace is not None
    if cause == TRACE:
        size = outcome.trace.tokens_per_id
        return f"at most: ids of {size:,} tokens do not say" if size else "the trace names no content"
    if cause == EVICTED and found.evicted:
        most = max(found.evicted, key=lambda each: each.tokens)
        return f"most: {names[most.group]}, for {names[most.taker]}, {most.steps:,} steps before (median)"
    lacked = [(counter[cause], name) for counter, name in zip(found.by_group, names, strict=True) if counter[cause]]
    return f"most: {max(lacked)[1]}" if lacked and len(names) > 1 else ""


class _Reasons:
    """Requests by reason and group: a column a group; where there is no room for that, a row a group."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], reasons: Sequence[str]) -> None:
        self._groups = groups
        self._reasons = [reason for reason in reasons if any(group["reasons"][reason] for group in groups)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table("beyond the hit")
        for group in self._groups:
            wide.add_column(_heading(group), justify="right", no_wrap=True)
        for reason in self._reasons:
            wide.add_row(reason, *(f"{group['reasons'][reason]:,}" for group in self._groups))
        if wide.__rich_measure__(console, options.update(max_width=UNBOUNDED)).maximum <= options.max_width:
            yield wide
            return
        tall = self._table("group")
        for reason in self._reasons:
            tall.add_column(reason, justify="right")
        for group in self._groups:
            tall.add_row(" ".join(_heading(group).split("\n")), *(f"{group['reasons'][r]:,}" for r in self._reasons))
        yield tall

    @staticmethod
    def _table(first: str) -> Table:
        table = Table(title="What each group lacked beyond the hits, requests", title_justify="left")
        table.add_column(first, no_wrap=True)
        return table


def _heading(group: Mapping[str, Any]) -> str:
    layers = len(group["layers"])
    lines = [group["group"], f"{layers} layer{'s' * (layers > 1)}" if layers else "", "(eagle)" * group["eagle"]]
    return "\n".join(line for line in lines if line)


def _occupancy(outcome: Outcome, width: int = 60) -> str:
    steps = outcome.recorder.steps
    if not steps.step:
        return "Blocks in use over time: no step had work\n"
    line = sparkline(over_time(steps.step, steps.in_use, outcome.steps, width), outcome.cache.blocks)
    return f"Blocks in use over time, of {outcome.cache.blocks:,}:\n{line}\n"


def over_time(steps: Sequence[int], values: Sequence[int], end: int, bins: int) -> list[int]:
    """The largest value in each of `bins` equal stretches of the steps [0, end); 0 where no step had work."""
    bins = min(bins, end)
    largest = [0] * bins
    for step, value in zip(steps, values, strict=True):
        place = step * bins // end
        largest[place] = max(largest[place], value)
    return largest


def sparkline(values: Sequence[int], top: int) -> str:
    """One bar a value; a blank for 0, the full bar for `top`."""
    return "".join(" " if not value else BARS[min(len(BARS) - 1, value * len(BARS) // max(top, 1))] for value in values)

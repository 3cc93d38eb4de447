"""VLLM's rules in two forms, in one process: the form written for XLA by hand, and the text lowered.

  python -m benchmarks.vllm_text --requests 4000 --turns 5
  python -m benchmarks.vllm_text --case stress --sites     # instructions of the lowered text, by rule and call site

Each case's operations (`benchmarks.vllm_text_cases`) are performed again, in one dispatch, by programs that know their
codes. A block operation is a block of one group through lookup, allocation, registration and release, as in
`benchmarks/replay.py`. Times are processor time, the least of alternating turns; tracing and compiling are told apart.
Of the lowered text all arrays are those of the plain run; of the other form every answer, the number of evictions, and
the order of the free queue.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import click
import jax
import numpy as np

from benchmarks.call_sites import sites
from benchmarks.vllm_text_cases import Batch, Case, cases
from hkv.cli.output_option import json_option, write_json
from hkv.dialects.vllm import machine
from hkv.dialects.vllm.plain import LAYOUT, groups_of, settings
from hkv.dialects.vllm.rules import operations as by_hand
from hkv.dialects.vllm.schedule.compiled import queue_of
from hkv.lowering.programs import Program
from hkv.machine import native_loops
from hkv.state.state import Counter
from hkv.state.status import Status as GivenStatus
from reference.dialects.vllm.operations import perform_all
from reference.dialects.vllm.records import Code, Status
from tests.vllm_text.batches import differing

QUIET = {"events": False, "explains": False, "tells": False}
"""Nothing is told besides answers."""

DATA = ("width", "finders", "hash", "grid", "alignment", "pool", "longest", "watermark", "prefill", "lookahead")
"""Settings that remove no code: they are data, so that a program serves all sizes."""

COLUMNS = {
    **{"amount": "tokens", "new": "new", "hit": "hit", "ahead": "lookahead", "external": "external"},
    **{"reserved": "reserved", "in_flight": "in_flight", "boundary": "shared_prefix", "delay": "delay"},
    **{"must_fit": "must_fit", "advances": "advance"},
}
"""Columns of the other form's operations, by fields of the text's."""


@dataclasses.dataclass
class Form:
    """A form of a case's rules.

    Attributes:
      once: performs all operations, and returns seconds. out: what the last turn left. compiled: seconds to trace and
      to compile, loops and segments, lines, copies of arrays.
    """

    once: Callable[[], float]
    figures: dict[str, float]
    out: Any = None


def lowered(batch: Batch, want: Mapping[str, Any], arrays: Mapping[str, Any]) -> Form:
    """The text, lowered."""
    static, count = known(batch), np.int32(len(batch.noted))
    state = {name: array for name, array in arrays.items() if name not in static}
    compiled, figures = _compiled(Program(LAYOUT, perform_all, static, among=values(batch)).lower(state, count))

    def once() -> float:
        given = jax.block_until_ready(jax.device_put(state))
        begun = time.process_time()
        form.out = jax.block_until_ready(compiled(given, count))
        return time.process_time() - begun

    form = Form(once, figures)
    once()
    assert differing(jax.device_get(form.out), want) == []
    return form


def known(batch: Batch) -> dict[str, int]:
    """Settings that a program knows."""
    found = settings(batch.config, **QUIET)
    data = [f"config.{name}" for name in DATA] + ["config.interval"] * (found["config.interval"] > 0)
    return {name: value for name, value in found.items() if name not in data}


def values(batch: Batch) -> dict[str, tuple[int, ...]]:
    """Values that arrays have, where knowing them removes code: codes, kinds of groups, what groups do or do not."""
    found = {"operations.code": tuple(sorted({int(fields["code"]) for fields, _ in batch.noted}))}
    groups = groups_of(batch.config)
    for name in groups[0]:
        among = tuple(sorted({int(group[name]) for group in groups}))
        if name == "kind" or {*among} <= {0, 1}:
            found[f"groups.{name}"] = among
    return found


def hand(batch: Batch, case: Case, arrays: Mapping[str, Any]) -> Form:
    """The form written for XLA."""
    config, longest, codes = case.config, case.limits.max_model_len, set[Any]()
    noted = by_hand.Batch()
    for fields, _ in batch.noted:
        start, code = fields["start"], by_hand.Code[Code(fields["code"]).name]
        payload = batch.payload[start : start + fields["count"]]
        noted.add(code, fields["slot"], payload, **{column: fields[name] for name, column in COLUMNS.items()})
        codes.add(code)
    buckets = machine.buckets_for(config, requests=batch.cache.slots, keys=len(arrays["entries.first"]), tokens=longest)
    parameters, state = machine.init(config, buckets)
    parameters, operations = jax.device_put((parameters, noted.build()))
    pure = machine.pure(only=tuple(sorted(codes)), ids=0, events=0)
    compiled, figures = _compiled(jax.jit(pure, donate_argnums=(1,)).lower(parameters, state, operations))

    def once() -> float:
        given = jax.block_until_ready(jax.device_put(state))
        begun = time.process_time()
        form.out = jax.block_until_ready(compiled(parameters, given, operations))
        return time.process_time() - begun

    form = Form(once, figures)
    once()
    return form


def agree(form: Form, other: Form, batch: Batch) -> None:
    """Makes sure that both forms decided alike."""
    state, results = jax.device_get(form.out)
    count, text = len(batch.noted), jax.device_get(other.out)
    granted = np.asarray(results.table)[:count, by_hand.Column.STATUS] == GivenStatus.OK
    alike = granted == (text["results.status"][1 : count + 1] == Status.OK)
    assert alike.all(), f"operation {int(np.argmin(alike))}: one form refuses it"
    asked = np.isin(text["operations.code"][1 : count + 1], (Code.LOOKUP, Code.ALLOCATE)) & granted
    values = np.asarray(results.table)[:count, by_hand.Column.VALUE]
    assert (values == text["results.value"][1 : count + 1])[asked].all()
    assert int(state.counters[Counter.EVICTIONS]) == int(text["evictions"])
    queue, ends = list[int](), int(text["free.ends"])
    while (block := int(text["free.newer"][queue[-1] if queue else ends])) != ends:
        queue.append(block)
    assert queue == queue_of(state)


def _compiled(traced: Any) -> tuple[Any, dict[str, float]]:
    jax.clear_caches()
    begun = time.process_time()
    compiled = traced.compile()
    spent, text = time.process_time() - begun, compiled.as_text()
    loops, segments = text.count(" while("), text.count(" conditional(")
    copies = len(re.findall(r"= s32\[\d{3,}\]\S* copy\(", text))
    sizes = {"loops": loops, "segments": segments, "lines": text.count("\n"), "copies": copies}
    return compiled, {"compile": spent, **sizes}


def measure(case: Case, turns: int) -> dict[str, Any]:
    """Both forms of a case, in alternating turns."""
    batch, work = case.noted(), case.work
    cache = batch.batch({}, **QUIET)
    arrays = LAYOUT.arrays_of(cache)
    begun = time.process_time()
    perform_all(cache, len(batch.noted))
    plain = (time.process_time() - begun) / work * 1e9
    text = lowered(batch, LAYOUT.arrays_of(cache), arrays)
    other = hand(batch, case, arrays)
    agree(other, text, batch)
    spent = {"hand": list[float](), "text": list[float]()}
    for _ in range(turns):
        for name, form in (("hand", other), ("text", text)):
            spent[name].append(form.once() / work * 1e9)
    found = {name: {"least": min(each), "median": statistics.median(each)} for name, each in spent.items()}
    for name, form in (("hand", other), ("text", text)):
        found[name] |= form.figures
    counts = {"operations": len(batch.noted), "block_operations": work, "evictions": batch.evictions}
    return {**counts, "plain": plain, **found}


def show_sites(case: Case) -> None:
    """Instructions of the lowered text by rule and call site, and by rule alone."""
    batch = case.noted()
    static, by_rule = known(batch), collections.Counter[str]()
    arrays = LAYOUT.arrays_of(batch.batch({}, **QUIET))
    state = {name: array for name, array in arrays.items() if name not in static}
    found = sites(LAYOUT, perform_all, state, 1, static, values(batch))
    places = collections.Counter[str]()
    for path, count in found.items():
        by_rule[name := path[-1].partition(":")[0]] += count
        places[name] += 1
    print(f"{sum(found.values())} instructions of {len(by_rule)} rules at {len(found)} call sites")
    for name, count in by_rule.most_common():
        print(f"{count:6} {name}, {places[name]} call sites")
    for path, count in sorted(found.items(), key=lambda each: -each[1]):
        print(f"{count:6} {' '.join(path)}")


@click.command()
@click.option("--requests", default=4000, show_default=True, help="Requests of the cheapest case; others have fewer.")
@click.option("--turns", default=5, show_default=True, help="Turns of each form.")
@click.option("--case", "only", multiple=True, help="Cases, by the beginnings of their names; all by default.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="A request trace for the mixed schedule.")
@click.option("--sites", "by_site", is_flag=True, help="Instructions of the text by rule and call site; no speed.")
@json_option
def main(
    requests: int, turns: int, only: tuple[str, ...], trace: str | None, by_site: bool, json_path: str | None
) -> None:
    """VLLM's rules in two forms."""
    native_loops.enable()
    jax.config.update("jax_enable_compilation_cache", False)
    chosen = {name: case for name, case in cases(requests, trace).items() if not only or name.startswith(only)}
    if by_site:
        for name, case in chosen.items():
            print(f"{name}: ", end="")
            show_sites(case)
        return
    found, columns = (
        dict[str, Any](),
        ("by hand", "lowered", "ratio", "compile, s", "loops", "segments", "lines", "copies"),
    )
    print(f"{'':28}" + "".join(f"{name:>12}" for name in columns))
    for name, case in chosen.items():
        found[name] = each = measure(case, turns)
        a, b = each["hand"], each["text"]
        numbers = f"{a['least']:12.1f}{b['least']:12.1f}{b['least'] / a['least']:12.2f}"
        seconds = f"{a['compile']:.1f} / {b['compile']:.1f}"
        print(f"{name:28}{numbers}{seconds:>12}" + "".join(f"{b[each]:12}" for each in columns[4:]), flush=True)
    ratios = [each["text"]["least"] / each["hand"]["least"] for each in found.values()]
    print(f"median of the ratios: {statistics.median(ratios):.2f}")
    if json_path:
        write_json(json_path, found)


if __name__ == "__main__":
    main()

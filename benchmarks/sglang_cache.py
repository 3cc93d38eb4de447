"""SGLang's cache of full attention and a window: HKV's compiled form beside the installed one's Python and Rust trees.

  build/peers/sglang/bin/python benchmarks/sglang_cache.py --trace TRACE.jsonl --requests 500
  python benchmarks/sglang_cache.py --trace TRACE.jsonl --requests 12031 --compiled --scaling

A page operation is one page of one pool through match, allocation, insertion and release: the pages of prompt and
output of each request, times two. One slot stands for a page of 64 tokens, so that SGLang does nothing by the token
that could be done by the page: prompts are chunks of up to 128 slots a step, and an output's pages come one by one.
All forms follow the same schedule, and every request must fare the same under all of them.

Of the compiled form the whole program is timed, the schedule included. Of SGLang the calls into it alone are: of its
cache `match_prefix`, `lock`, `unlock`, `checkpoint`, `evict_sliding_windows` and `free_kv_row`, and of its allocation
`alloc_token_slots`, which evicts; making keys and requests, and reading slots, are left out. Times are processor time
of the process, the least of several runs: on a machine that others use the wall clock tells of them. Compiling is left
out. `--scaling` asks the compiled form alone for pools of 1,000 to 1,000,000 pages, by requests of 34 pages of which 16
are shared, until each page was taken three times; the shared ones fit into the smallest pool beside the requests that
run, so that all but the first requests hit in every pool.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import jax
import numpy as np

from hkv.cli.output_option import json_option, write_json
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.replay_command import SGLangLoop
from hkv.dialects.sglang.schedule import SGLangCompiledReplay
from hkv.errors import HKVError
from hkv.machine import native_loops
from hkv.replay import dispatches
from hkv.replay.run import Timing
from hkv.replay.schedule import Arrival, Recorder, Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TOKENS_PER_ID, read_trace

PAGE = 64
"""Tokens that a slot stands for."""

SCHEDULE = Schedule(step_tokens=8192 // PAGE, decode_tokens=1, max_running=48, max_model_len=2048)
"""Numbers of the schedule, in slots."""

POOLS = (1_000, 10_000, 100_000, 1_000_000)
"""Pages of each pool that `--scaling` asks for."""

CACHE_CALLS = ("match_prefix", "lock", "unlock", "checkpoint", "evict_sliding_windows", "free_kv_row")
"""Methods of SGLang's cache that are timed."""

PREFIXES = 4
"""Prefixes of 16 pages that the requests of `--scaling` share."""

Measured = tuple[float, dict[int, tuple[int, int]]]
"""Seconds of a run, and of each request its hit and the step in which it ended."""


def slots_of(trace: str, limit: int) -> list[Arrival]:
    """The first requests of a trace in slots, with a key a slot; what fills no page has a key of its own."""
    read = InternedTrace(read_trace(trace, TOKENS_PER_ID, limit))
    keys, timing = read.keys(PAGE, 1 << 30), Timing()
    made, fresh = list[Arrival](), int(keys.keys.max(initial=0)) + 1
    for index, request in enumerate(read.requests):
        prompt, output = (max(1, -(-length // PAGE)) for length in (request.input_length, request.output_length))
        whole = np.asarray(keys.of(index))[: prompt + output]
        own = np.arange(fresh, fresh + prompt + output - len(whole))
        fresh += len(own)
        numbers = np.concatenate([whole, own]).astype(np.int32)
        if prompt + output <= SCHEDULE.max_model_len:
            step = timing.step_of(request.timestamp)
            made.append(Arrival(len(made), step, prompt, output, functools.partial(_given, numbers)))
    return made


def shared_prompts(count: int) -> list[Arrival]:
    """Requests of 32 and 2 slots, two a step, whose first 16 are one of `PREFIXES`."""
    made = []
    for index in range(count):
        first, own = index % PREFIXES, PREFIXES * 16 + 18 * index
        numbers = np.concatenate([np.arange(16) + 16 * first, np.arange(18) + own]).astype(np.int32)
        made.append(Arrival(index, index // 2, 32, 2, functools.partial(_given, numbers)))
    return made


def _given(numbers: Any) -> Any:
    return numbers


def header_of(pages: tuple[int, int], window: int) -> structs.Header:
    """A cache of so many slots of each pool, with a window of so many."""
    groups = [{"kind": structs.FULL_ATTENTION, "block_size": 1}]
    groups.append({"kind": structs.SLIDING_WINDOW, "block_size": 1, "window": window})
    return structs.Header(
        dialect=structs.NAME, feature="replay", num_blocks=list(pages), groups=groups, bugs=sorted(BUGS)
    )


def run_compiled(header: structs.Header, arrivals: list[Arrival]) -> Callable[[], Measured]:
    """The compiled schedule over the compiled cache."""
    config, incoming = structs.to_config(header), dispatches.incoming(arrivals, SCHEDULE.max_model_len)

    def run() -> Measured:
        replay = SGLangCompiledReplay(config, SCHEDULE, incoming)
        jax.block_until_ready(replay.resident)
        begun = time.process_time()
        replay.run()
        return time.process_time() - begun, _results(replay.recorder())

    return run


def run_installed(header: structs.Header, arrivals: list[Arrival], backend: str) -> Callable[[], Measured]:
    """The plain schedule over an installed SGLang, whose own calls are timed."""
    from hkv.dialects.sglang.engines import installed, sglang_objects

    sglang_objects.torch.set_num_threads(1)

    def run() -> Measured:
        engine = installed.python(header) if backend == "python" else installed.rust(header)
        spent, allocate = Spent(), sglang_objects.allocation.alloc_token_slots
        for name in CACHE_CALLS:
            setattr(engine._cache, name, spent.timed(getattr(engine._cache, name)))  # type: ignore[union-attr]
        recorder = Recorder(sum(header.num_blocks) + 1, None, lambda: None)
        sglang_objects.allocation.alloc_token_slots = spent.timed(allocate)
        try:
            SGLangLoop(engine, 1, SCHEDULE, arrivals, recorder).run()
        finally:
            sglang_objects.allocation.alloc_token_slots = allocate
        return spent.seconds, _results(recorder)

    return run


class Spent:
    """Processor time inside timed functions; a call within a call counts once.

    Attributes:
      seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def call(*given: Any, **named: Any) -> Any:
            self._depth += 1
            begun = time.process_time()
            try:
                return function(*given, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begun

        return call


def _results(recorder: Recorder) -> dict[int, tuple[int, int]]:
    return {index: (record.hit, record.ended) for index, record in recorder.requests.items()}


def measure(runs: dict[str, Callable[[], Measured]], operations: int, repeats: int) -> dict[str, dict[str, float]]:
    """Runs each form once to compile, then all in turn.

    Raises:
      ClickException: a request fares differently under one of them.
    """
    first = {name: run()[1] for name, run in runs.items()}
    name, results = next(iter(first.items()))
    for other, found in first.items():
        parted = next((index for index, result in results.items() if found[index] != result), None)
        if parted is not None:
            raise click.ClickException(
                f"request {parted}: {results[parted]} under {name}, {found[parted]} under {other}"
            )
    seconds = {name: [run()[0] for _ in range(repeats)] for name, run in runs.items()}
    return {
        name: {
            "seconds": min(times),
            "ns_per_page_operation": min(times) / operations * 1e9,
            "hit_slots": sum(hit for hit, _ in results.values()),
        }
        for name, times in seconds.items()
    }


def operations_of(arrivals: list[Arrival]) -> int:
    """Page operations of some requests."""
    return 2 * sum(arrival.prompt + arrival.output for arrival in arrivals)


def scaling(repeats: int) -> list[dict[str, Any]]:
    """Cost of a page operation of the compiled form by the size of its pools."""
    points = []
    for pages in POOLS:
        arrivals = shared_prompts(max(6_000, 3 * pages // 34))
        run = run_compiled(header_of((pages, pages), 16), arrivals)
        points.append({"pages": pages, **measure({"compiled": run}, operations_of(arrivals), repeats)["compiled"]})
        if points[-1]["hit_slots"] < 16 * (len(arrivals) - 8 * PREFIXES):
            raise click.ClickException(
                f"{pages} pages: {points[-1]['hit_slots']} slots hit: not the case of the others"
            )
    return points


@click.command()
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False), help="A request trace.")
@click.option("--requests", default=500, show_default=True, type=click.IntRange(min=1), help="Its first so many.")
@click.option(
    "--pages", nargs=2, default=(30_000, 7_500), show_default=True, type=click.IntRange(1), help="Of the pools."
)
@click.option("--window", default=16, show_default=True, type=click.IntRange(min=1), help="Pages of the window.")
@click.option("--compiled", "only_compiled", is_flag=True, help="Leave the installed SGLang out.")
@click.option("--scaling", "scales", is_flag=True, help="Ask for pools of 1,000 to 1,000,000 pages, too.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Timed runs of each form.")
@json_option
def main(
    trace: str,
    requests: int,
    pages: tuple[int, int],
    window: int,
    only_compiled: bool,
    scales: bool,
    repeats: int,
    json_path: str | None,
) -> None:
    """Measure a page operation of all forms on the same requests."""
    arrivals, header = slots_of(trace, requests), header_of(pages, window)
    runs = {"HKV, compiled": run_compiled(header, arrivals)}
    if not only_compiled:
        runs["SGLang, Rust tree"] = run_installed(header, arrivals, "rust")
        runs["SGLang, Python tree"] = run_installed(header, arrivals, "python")
    operations = operations_of(arrivals)
    result = {
        "requests": len(arrivals),
        "pages": list(pages),
        "window": window,
        "page_operations": operations,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "forms": measure(runs, operations, repeats),
        "scaling": scaling(repeats) if scales else [],
    }
    if json_path:
        write_json(json_path, result)
    if json_path != "-":
        show(result)


def show(result: dict[str, Any]) -> None:
    """The figures, one form a line."""
    for name in ("requests", "pages", "window", "page_operations", "cores", "jax"):
        print(f"{name:18} {result[name]}")
    for name, form in result["forms"].items():
        print(f"{name:20} {form['ns_per_page_operation']:>10,.1f} ns each   hit slots {form['hit_slots']:,}")
    for point in result["scaling"]:
        print(f"{point['pages']:>12,} pages {point['ns_per_page_operation']:>10,.1f} ns each")


if __name__ == "__main__":
    native_loops.enable()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    try:
        main()
    except HKVError as error:
        sys.exit(f"sglang_cache.py: {error}")

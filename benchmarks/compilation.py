"""Time to trace and to compile: whole steps and arrivals, the machines with every operation, and the schedule.

taskset -c 0 python benchmarks/compilation.py       # seconds of one core
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from hkv.machine import native_loops
from hkv.model.topology import Topology
from hkv.serving import single_thread
from hkv.spec import spec_from_text

GROUPS = "full:16,swa:16:1024,swa:16:128"


def measure(make: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Seconds of CPU to trace and to compile what `make` lowers; nothing is kept between turns."""
    import jax

    seconds: dict[str, list[float]] = {"trace": [], "compile": []}
    for _ in range(repeats):
        jax.clear_caches()
        start = time.process_time()
        lowered = make()
        traced = time.process_time()
        lowered.compile()
        seconds["trace"].append(traced - start)
        seconds["compile"].append(time.process_time() - traced)
    return seconds


def topology() -> Topology:
    """The groups of all programs but the schedule."""
    return Topology.of_specs([spec_from_text(text) for text in GROUPS.split(",")])


def programs() -> dict[str, Callable[[], Any]]:
    """Programs to compile, by name."""
    import jax

    from hkv.dialects.vllm import machine as cache
    from hkv.dialects.vllm.schedule import compiled
    from hkv.dialects.vllm.schedule.run import cache_config
    from hkv.machine.operations import WIDTH, Operations
    from hkv.replay import dispatches
    from hkv.replay.schedule import Schedule
    from hkv.spec import spec_from_text

    schedule = Schedule(max_model_len=4096)
    config = cache_config([spec_from_text(text) for text in GROUPS.split(",")], 100_000, schedule)
    buckets = cache.buckets_for(config, requests=256, keys=1 << 18, tokens=4096)
    parameters, state = cache.init(config, buckets)
    operations = Operations(np.zeros((1001, WIDTH), np.int32), np.zeros(4096, np.int32))  # type: ignore[arg-type]

    def run(room: int) -> Any:
        function = jax.jit(lambda *given: cache.run(*given, ids=room, events=room), donate_argnums=1)
        return function.lower(parameters, state, operations)

    replay = compiled.CompiledReplay(config, schedule, dispatches.incoming([], 4096))

    def scheduled() -> Any:
        program = cast(Any, compiled.program)
        program.cache_clear()
        return program(0).lower(replay._parameters, replay._inputs, replay.resident)

    return {
        **serving_programs(),
        "run, every operation": lambda: run(0),
        "run, reporting ids and events": lambda: run(1000),
        "the schedule of hkv replay": scheduled,
        "RTP-LLM": lambda: rtp_program(prefix_tree=False),
        "RTP-LLM, with a prefix tree": lambda: rtp_program(prefix_tree=True),
    }


def rtp_program(*, prefix_tree: bool) -> Any:
    """Every operation under RTP-LLM's rules, of a configuration that is known."""
    from hkv.dialects.rtp_llm.config import RtpConfig
    from hkv.dialects.rtp_llm.plain import LAYOUT, empty_arrays, settings
    from hkv.lowering.programs import Program
    from reference.dialects.rtp_llm.operations import perform_all

    config = RtpConfig(topology=topology(), num_blocks=(1024,), prefix_tree=prefix_tree)
    sizes = {"keys": 4096, "slots": 32, "batch": 4, "row": 512}
    arrays = empty_arrays(config, **sizes, operations=1000, payload=4096, told=4096)
    static = settings(config)
    state = {name: array for name, array in arrays.items() if name not in static}
    return Program(LAYOUT, perform_all, static).lower(state, 1000)


def serving_programs() -> dict[str, Callable[[], Any]]:
    """A step of 256 rows, one of which may compute a chunk of 512 tokens, and eight prompts of 512 that arrive."""
    import jax

    from hkv.cache import arrivals
    from hkv.cache import step as serving
    from hkv.cache.state import StepBatch
    from hkv.dialects.vllm.config import VllmConfig

    rows, coming, tokens = 256, 8, 512
    config = VllmConfig(topology=topology(), num_blocks=65536, hash_block_size=16, scheduler_block_size=16)
    parameters, state = serving.init(config, rows=rows, row=256)
    whole, lines = np.zeros(rows + tokens - 1, np.int32), np.arange(rows, dtype=np.int32)
    batch = StepBatch(whole, np.arange(rows + 1, dtype=np.int32), lines, 0 * lines, 0 * lines)  # type: ignore[arg-type]
    prompts = np.zeros((coming, tokens), np.int32), np.full(coming, tokens, np.int32)
    new = arrivals.Arrivals(lines[:coming], np.zeros((coming, 4), np.uint32), *prompts)  # type: ignore[arg-type]
    room = serving.room_for(config, queries=rows, tokens=rows + tokens - 1)

    def stepped() -> Any:
        return jax.jit(functools.partial(serving.step, room=room), donate_argnums=1).lower(parameters, state, batch)

    def arrived() -> Any:
        return jax.jit(arrivals.arrive, donate_argnums=1).lower(parameters, state, new)

    return {
        "hkv.cache.step": stepped,
        "hkv.cache.arrivals": arrived,
        "hkv.cache.step, specialised": lambda: serving.specialised(parameters, room).trace(state, batch).lower(),
        "hkv.cache.arrivals, specialised": lambda: arrivals.specialised(parameters).trace(state, new).lower(),
    }


@click.command()
@click.option("--repeats", default=5, show_default=True, help="Compilations of each program.")
@click.option("--only", help="Programs whose names begin so.")
@click.option("--json", "json_path", help="Write the figures there.")
def main(repeats: int, only: str | None, json_path: str | None) -> None:
    """Times compilations."""
    if repeats < 1:
        raise click.UsageError(f"--repeats {repeats}: at least 1 was expected")
    native_loops.enable()
    single_thread.enable()
    table = Table("program", "trace: median s", "compile: median s", "least")
    figures: dict[str, dict[str, list[float]]] = {}
    chosen = {name: make for name, make in programs().items() if name.startswith(only or "")}
    if not chosen:
        raise click.UsageError(f"--only {only}: a program was expected, one of {list(programs())}")
    for name, make in chosen.items():
        figures[name] = seconds = measure(make, repeats)
        trace, compiling = (statistics.median(seconds[part]) for part in ("trace", "compile"))
        table.add_row(name, f"{trace:.2f}", f"{compiling:.2f}", f"{min(seconds['compile']):.2f}")
    Console(file=sys.stdout).print(table)
    if json_path:
        from hkv.oracle.log_file import write_atomically

        write_atomically(pathlib.Path(json_path), json.dumps(figures, indent=2).encode())


if __name__ == "__main__":
    main()

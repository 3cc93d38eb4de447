"""Time that the compiled cache takes to trace and to compile: the machine with every operation, and the schedule.

python benchmarks/compilation.py
"""

from __future__ import annotations

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

GROUPS = "full:16,swa:16:1024,swa:16:128"


def measure(make: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Seconds to trace and to compile what `make` lowers; nothing is kept between turns."""
    import jax

    seconds: dict[str, list[float]] = {"trace": [], "compile": []}
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        lowered = make()
        traced = time.perf_counter()
        lowered.compile()
        seconds["trace"].append(traced - start)
        seconds["compile"].append(time.perf_counter() - traced)
    return seconds


def programs() -> dict[str, Callable[[], Any]]:
    """Programs to compile, by name."""
    import jax

    from hkv.dialects.vllm import machine as cache
    from hkv.dialects.vllm.schedule import compiled, program
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
        program.compiled.cache_clear()
        return cast(Any, program.compiled(0)).lower(replay._parameters, replay._inputs, replay.resident)

    return {
        "run, every operation": lambda: run(0),
        "run, reporting ids and events": lambda: run(1000),
        "the schedule of hkv replay": scheduled,
    }


@click.command()
@click.option("--repeats", default=5, show_default=True, help="Compilations of each program.")
@click.option("--json", "json_path", help="Write the figures there.")
def main(repeats: int, json_path: str | None) -> None:
    """Times compilations."""
    if repeats < 1:
        raise click.UsageError(f"--repeats {repeats}: at least 1 was expected")
    native_loops.enable()
    table = Table("program", "trace: median s", "compile: median s", "least")
    figures: dict[str, dict[str, list[float]]] = {}
    for name, make in programs().items():
        figures[name] = seconds = measure(make, repeats)
        trace, compiling = (statistics.median(seconds[part]) for part in ("trace", "compile"))
        table.add_row(name, f"{trace:.2f}", f"{compiling:.2f}", f"{min(seconds['compile']):.2f}")
    Console(file=sys.stdout).print(table)
    if json_path:
        from hkv.oracle.atomic import write_atomically

        write_atomically(pathlib.Path(json_path), json.dumps(figures, indent=2).encode())


if __name__ == "__main__":
    main()

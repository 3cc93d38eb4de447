"""Cost of a replay, of a sweep of 12 sizes, and of 100 points of 1,000 requests, next to a simulator's, in one run.

    python benchmarks/sweep_speed.py --trace conversation_trace.jsonl --simulator PATH/bin/kvcache-simulator

Whole commands from start to end, each run once before it is measured, so that its program is compiled. Wall seconds are
the least of all runs, CPU seconds those of that run, of all its processes. The simulator is `kvcache-simulator` (PyPI,
0.1.3); without it HKV is measured alone, and the report says so. What each does for its time:

- HKV replays every step of the engine: a queue, admissions, chunks, growth, preemption; three groups (full attention,
  windows of 1,024 and 128 tokens) over one pool of blocks of 16 tokens, and every block that is found, handed out,
  given back, evicted.
- The simulator keeps one tree of the trace's ids of 512 tokens under an average of bytes a token. Nothing runs or
  waits, and there are neither groups nor an engine's blocks: a point of the whole trace is 182,790 ids looked up.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import click

from hkv.cli.output_option import json_option, write_json

GROUPS = "full:16,swa:16:1024,swa:16:128"
SIZES = "20000..1280000"
BUDGETS = (16, 23, 34, 50, 73, 106, 155, 227, 331, 484, 707, 1024)


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that is timed, and the replays of a trace that it makes."""

    name: str
    command: Sequence[str]
    points: int


def cases(trace: str, jobs: int, simulator: str | None) -> list[Case]:
    """The commands: HKV's three, and the simulator's sweep where it is there."""
    hkv = (sys.executable, "-m", "hkv")
    cache, several = ("--groups", GROUPS), ("--jobs", str(jobs))
    found = [
        Case("hkv replay", (*hkv, "replay", trace, *cache, "--num-blocks", "200000"), 1),
        Case("hkv sweep, 12 sizes", (*hkv, "sweep", trace, *cache, "--num-blocks", f"{SIZES}:12", *several), 12),
        Case(
            "hkv sweep, 1,000 requests, 100 sizes",
            (*hkv, "sweep", trace, *cache, "--limit", "1000", "--num-blocks", f"{SIZES}:100", *several),
            100,
        ),
    ]
    if simulator is not None:
        model = ("--model", "gemma-4-26b-a4b", "--block-size", "512", "--no-progress", "--policies", "lru")
        budgets = ("--budgets-gib", ",".join(map(str, BUDGETS)))
        command = (simulator, "sweep", "--trace", trace, *model, *budgets)
        found.append(Case("kvcache-simulator sweep, 12 budgets", command, len(BUDGETS)))
    return found


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command and all its processes."""
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    before, started = _cpu(), time.perf_counter()
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    wall, cpu = time.perf_counter() - started, _cpu() - before
    if ended.returncode:
        raise click.ClickException(f"{' '.join(command)}: status {ended.returncode}: {ended.stderr.strip()[-300:]}")
    return wall, cpu


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(each: Case, repeats: int) -> dict[str, Any]:
    """The best of some runs, after one that is not counted."""
    timed(each.command)
    wall, cpu = min(timed(each.command) for _ in range(repeats))
    return {"case": each.name, "points": each.points, "wall": wall, "cpu": cpu, "cpu_a_point": cpu / each.points}


@click.command()
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False), help="Mooncake's conversations.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(min=1), help="Processes of a sweep.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--simulator", metavar="PATH", help="The command kvcache-simulator.  [default: the one on PATH, if any]")
@json_option
def main(trace: str, jobs: int, repeats: int, simulator: str | None, json_path: str | None) -> None:
    """Measure a replay and two sweeps, next to a simulator where it is installed."""
    simulator = simulator or shutil.which("kvcache-simulator")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("HKV_COMPILATION_CACHE", folder)
        for each in cases(trace, jobs, simulator):
            found.append(measure(each, repeats))
            if json_path != "-":
                print("{case:37} {wall:7.2f} s wall {cpu:7.2f} s CPU {cpu_a_point:7.3f} s a point".format(**found[-1]))
    if simulator is None and json_path != "-":
        print("kvcache-simulator was not measured: it is not on PATH, and --simulator does not name it")
    write_json(json_path, {"jobs": jobs, "repeats": repeats, "cases": found})


if __name__ == "__main__":
    main()

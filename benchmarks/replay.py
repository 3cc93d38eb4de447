"""Speed of the compiled cache, next to vLLM's own block manager on the same machine in the same run.

    python benchmarks/replay.py --mode prompts --trace TRACE.jsonl --vllm-python PATH/bin/python

A block operation is one block of one group through lookup, allocation, registration and release:
ceil(tokens / block size) x groups for each request. Making keys and requests, interning, compiling and building pools
are left out, for both; of vLLM only the calls of its manager are timed, of HKV whole dispatches, schedule included.
Before anything is timed both decide, and must agree on the hit tokens of every request, the id of every block found or
handed out, and the final order of the free queue. Runs of both alternate; the ratio is that of the medians, beside that
of the least times, which say more on a machine that others use too. Without `--vllm-python` only HKV's figures are
measured, and the report says so.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import click
import numpy as np

from hkv.cli.output_option import json_option, write_json
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.errors import HKVError
from hkv.machine import native_loops
from hkv.replay.run import Timing, interned_arrivals
from hkv.replay.schedule import Arrival, Schedule
from hkv.replay.schedule_state import Arriving
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TOKENS_PER_ID, read_trace
from hkv.spec import spec_from_text

GROUPS = "full:16,swa:16:1024,swa:16:128"
STRESS_BLOCKS = 4000


@dataclasses.dataclass(frozen=True)
class Case:
    """Case that both sides run.

    Attributes:
      mode: `prompts` or `schedule`; a stress case runs prompts.
      groups: as the command line writes them.
      num_blocks: blocks in the pool.
      schedule: the schedule's numbers; of prompts only the longest one counts.
      arrivals: the requests.
    """

    mode: str
    groups: str
    num_blocks: int
    schedule: Schedule
    arrivals: list[Arrival]

    @property
    def config(self) -> Any:
        """The cache."""
        specs = [spec_from_text(part) for part in self.groups.split(",")]
        return cache_config(specs, self.num_blocks, self.schedule)

    @property
    def block_operations(self) -> int:
        """ceil(tokens / block size) x groups, over all requests; prompts generate nothing."""
        config, total = self.config, 0
        for arrival in self.arrivals:
            tokens = arrival.prompt + (arrival.output if self.mode == "schedule" else 0)
            total += sum(-(-tokens // size) for size in config.block_sizes)
        return total


def stress_arrivals(requests: int, seed: int = 0) -> list[Arrival]:
    """Prompts over few documents, cut anywhere: about half hits, many blocks with equal keys.

    Lengths are multiples of the block size, so that a prompt's last block is computed again and enters the cache beside
    the one that is there.
    """
    source = np.random.default_rng(seed)
    documents, length, fresh, made = 24, 96, 0, []
    keys = np.arange(documents * length).reshape(documents, length)
    fresh = keys.size
    for index in range(requests):
        kept = int(source.integers(1, length + 1))
        own = 0 if source.random() < 0.6 else int(source.integers(0, 64))
        document = keys[min(int(source.exponential(5.0)), documents - 1)]
        mine = [*document[:kept].tolist(), *range(fresh, fresh + own)]
        fresh += own
        made.append(Arrival(index, index, 16 * len(mine), 0, lambda mine=mine: mine))
    return made


def trace_arrivals(trace: str, limit: int | None, groups: str, schedule: Schedule, output: bool) -> list[Arrival]:
    """The requests of a trace, their keys made."""
    specs = [spec_from_text(part) for part in groups.split(",")]
    size = cache_config(specs, 16, schedule).hash_block_size
    made = []
    requests = InternedTrace(read_trace(trace, TOKENS_PER_ID, limit))
    for arrival in interned_arrivals(requests, size, schedule.max_model_len, Timing()):
        keys = arrival.keys()
        if arrival.prompt + arrival.output > schedule.max_model_len:
            continue
        made.append(dataclasses.replace(arrival, output=arrival.output if output else 0, keys=lambda keys=keys: keys))
    return made


class Vllm:
    """vLLM's manager in a process of its own."""

    def __init__(self, python: str, case: Case, folder: pathlib.Path, prepared: Any) -> None:
        self._arrays = folder / "arrays.npz"
        self._ids = folder / "ids.npz"
        columns = [Arriving.STEP, Arriving.PROMPT, Arriving.OUTPUT, Arriving.KEY_START]
        np.savez(self._arrays, requests=prepared.requests[:-1, columns], keys=prepared.keys)
        self._job = {
            "mode": case.mode,
            "groups": case.groups,
            "num_blocks": case.num_blocks,
            "schedule": dataclasses.asdict(case.schedule),
            "arrays": str(self._arrays),
        }
        root = pathlib.Path(__file__).resolve().parent.parent
        environment = {**os.environ, "PYTHONPATH": str(root), "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [python, str(root / "benchmarks" / "vllm_manager.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        )

    def run(self, ids: bool) -> dict[str, Any]:
        """One run; with ids also every id and the final free queue."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({**self._job, "ids": str(self._ids) if ids else ""}) + "\n")
        self._process.stdin.flush()
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise click.ClickException(f"vLLM's process ended with status {self._process.wait()}")
            if line.startswith("{"):
                break
        result = json.loads(line)
        if ids:
            with np.load(self._ids) as arrays:
                result |= {name: arrays[name] for name in arrays.files}
        return result

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def measure(case: Case, python: str | None, repeats: int) -> dict[str, Any]:
    """Runs both sides, compares their decisions, and returns the figures."""
    from benchmarks import compiled_runs

    prepared = compiled_runs.prepare(case)
    mine = compiled_runs.run(case, prepared, ids=True)
    operations = case.block_operations
    result: dict[str, Any] = {
        "mode": case.mode,
        "groups": case.groups,
        "num_blocks": case.num_blocks,
        "requests": len(case.arrivals),
        "block_operations": operations,
        "hit_tokens": int(sum(mine["hits"])),
        "prompt_tokens": sum(arrival.prompt for arrival in case.arrivals),
        "preemptions": mine["preemptions"],
        "evictions": mine["evictions"],
    }
    theirs: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        vllm = Vllm(python, case, pathlib.Path(folder), prepared) if python else None
        if vllm:
            compare(mine, vllm.run(ids=True))
            result["same_decisions"] = True
        compiled_runs.run(case, prepared, ids=False)
        for _ in range(repeats):
            ours += [compiled_runs.run(case, prepared, ids=False)["seconds"] for _ in range(3)]
            if vllm:
                theirs.append(vllm.run(ids=False)["seconds"])
        if vllm:
            vllm.close()
    result["hkv_ns"] = nanoseconds(ours, operations)
    if theirs:
        result["vllm_ns"] = nanoseconds(theirs, operations)
        result["ratio"] = {name: result["vllm_ns"][name] / result["hkv_ns"][name] for name in ("median", "least")}
    return result


def compare(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fails where the two sides decided differently."""
    for name in ("hits", "ended", "steps", "ids", "queue"):
        if name in theirs and not np.array_equal(mine[name], theirs[name]):
            a, b = np.asarray(mine[name]).reshape(-1), np.asarray(theirs[name]).reshape(-1)
            count = min(len(a), len(b))
            place = next((int(i) for i in np.flatnonzero(a[:count] != b[:count])), count)
            raise click.ClickException(f"{name} differ from vLLM's at place {place}: {a[place:][:1]}, {b[place:][:1]}")


def nanoseconds(seconds: list[float], operations: int) -> dict[str, float]:
    """Per block operation: median, least, and how many runs."""
    return {
        "median": statistics.median(seconds) / operations * 1e9,
        "least": min(seconds) / operations * 1e9,
        "runs": len(seconds),
    }


def machine() -> dict[str, Any]:
    """Machine on which the figures were measured."""
    import jax

    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "native_loops": native_loops.OPTION in os.environ.get("XLA_FLAGS", ""),
    }


@click.command()
@click.option(
    "--mode", required=True, type=click.Choice(["prompts", "schedule", "stress", "scaling", "tier", "offload"])
)
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="A request trace; for prompts and schedule."
)
@click.option("--requests", type=click.IntRange(min=1), help="The trace's first so many; for stress how many to make.")
@click.option("--groups", default=GROUPS, show_default=True)
@click.option(
    "--num-blocks",
    type=click.IntRange(min=2),
    help="Blocks in the pool; chunks of one more tier.  [default: 200000; stress: 4000]",
)
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Timed runs of vLLM; of HKV thrice."
)
@click.option("--vllm-python", type=click.Path(exists=True, dir_okay=False), help="An interpreter that has vLLM 0.33.")
@click.option("--plot", "plot_path", metavar="FILE", help="scaling: where to draw it, PNG.")
@json_option
def main(**options: Any) -> None:
    """Measure the compiled cache, next to vLLM's manager where an interpreter has it.

    \b
    Example:
      python benchmarks/replay.py --mode stress --vllm-python vllm-env/bin/python
    """
    mode = options["mode"]
    if mode == "scaling":
        from benchmarks import scaling

        result = scaling.measure(options["repeats"], options["plot_path"])
    elif mode == "tier":
        from benchmarks import scaling

        result = scaling.measure_tier(options["repeats"], options["num_blocks"])
    elif mode == "offload":
        from benchmarks import scaling

        result = scaling.measure_offload(
            make_case({**options, "mode": "schedule"}), scaling.COMPILED_TIERS, options["repeats"]
        )
    else:
        result = measure(make_case(options), options["vllm_python"], options["repeats"])
        result["mode"] = mode
    result["machine"] = machine()
    if options["json_path"]:
        write_json(options["json_path"], result)
    if options["json_path"] != "-":
        show(result)


def make_case(options: dict[str, Any]) -> Case:
    """The case that the options name."""
    mode = options["mode"]
    if mode == "stress":
        made = stress_arrivals(options["requests"] or 4000)
        longest = max(arrival.prompt for arrival in made)
        schedule = Schedule(max_model_len=longest + 16)
        return Case("prompts", options["groups"], options["num_blocks"] or STRESS_BLOCKS, schedule, made)
    if not options["trace"]:
        raise click.UsageError("--trace is needed for prompts and schedule")
    schedule = Schedule()
    made = trace_arrivals(options["trace"], options["requests"], options["groups"], schedule, mode == "schedule")
    return Case(mode, options["groups"], options["num_blocks"] or 200_000, schedule, made)


def show(result: dict[str, Any]) -> None:
    """The figures, one a line."""
    for name, value in result.items():
        if isinstance(value, dict):
            value = ", ".join(
                f"{key} {each:,.1f}" if isinstance(each, float) else f"{key} {each}" for key, each in value.items()
            )
        if not isinstance(value, list):
            print(f"{name:18} {value}")
    if "ratio" not in result and result.get("mode") not in ("scaling", "tier", "offload"):
        print("vLLM was not measured: no --vllm-python")


if __name__ == "__main__":
    native_loops.enable()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    try:
        main()
    except HKVError as error:
        sys.exit(f"replay.py: {error}")

"""The same trace through vLLM's rules and RTP-LLM's: what an operation costs in the NumPy and in the compiled forms.

  python benchmarks/dialects.py --trace TRACE.jsonl --requests 300
  python benchmarks/dialects.py --trace TRACE.jsonl --requests 12031 --compiled

A block operation is one block of one group through lookup, allocation, registration and release:
ceil(tokens / block size) x groups for each request, generated tokens included. The NumPy forms are driven by the plain
schedules of `hkv replay`; of the compiled forms the whole schedule is one program. Both forms of a dialect must find
the same tokens. Making keys, reading the trace and compiling are left out. Runs of all forms alternate; the least time
says most on a machine that others use too.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import jax

from hkv.cli.output_option import json_option, write_json
from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE
from hkv.dialects.rtp_llm.schedule import compiled as rtp_compiled
from hkv.dialects.rtp_llm.schedule.agreement import RtpRecorder
from hkv.dialects.rtp_llm.schedule.run import RtpReplay, RtpReplayedCache
from hkv.dialects.rtp_llm.schedule.run import rtp_cache as rtp_config
from hkv.dialects.vllm.schedule import compiled
from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config
from hkv.dialects.vllm.schedule.schedule import Chunking, Replay
from hkv.errors import HKVError
from hkv.machine import native_loops
from hkv.oracle.engines import engine_factory
from hkv.replay import dispatches
from hkv.replay.run import Timing, interned_arrivals
from hkv.replay.schedule import Arrival, Recorder, Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TOKENS_PER_ID, read_trace
from hkv.spec import spec_from_text


def nobody() -> None:
    """Takes no note of progress."""


class Sides:
    """Everything that is run, made once.

    Args:
      specs: one a group.
      blocks: blocks of the pool, or of each.
      dialect: RTP-LLM's.
      schedule: the schedule's numbers.
      arrivals: the requests, their keys made.
    """

    def __init__(self, specs: list[Any], blocks: int, dialect: str, schedule: Schedule, made: list[Arrival]) -> None:
        self.vllm = cache_config(specs, blocks, schedule)
        self.rtp = rtp_config(dialect, specs, [blocks], reserve_ratio=0)
        self._schedule, self._made = schedule, made
        self._incoming = dispatches.incoming(made, schedule.max_model_len)
        self._sizes = compiled.sizes_of(self.vllm, schedule, self._incoming)

    def vllm_numpy(self) -> tuple[float, int]:
        """Seconds and hit tokens of the plain schedule over vLLM's NumPy form."""
        recorder = Recorder(self.vllm.num_blocks, None, nobody)
        engine = VllmReplayedCache(self.vllm).engine("numpy", engine_factory("numpy"))
        chunking = Chunking.of(self.vllm, self._schedule.step_tokens)
        start = time.perf_counter()
        Replay(engine, self._schedule, chunking, self._made, recorder).run()
        return time.perf_counter() - start, _hits(recorder)

    def vllm_jax(self) -> tuple[float, int]:
        """Seconds and hit tokens of the compiled schedule over vLLM's compiled form."""
        replay = compiled.CompiledReplay(
            self.vllm, self._schedule, self._incoming, sizes=self._sizes, diagnose=False, ids=0
        )
        jax.block_until_ready(replay.resident)
        start = time.perf_counter()
        replay.run()
        seconds = time.perf_counter() - start
        return seconds, _hits(replay.recorder())

    def rtp_numpy(self) -> tuple[float, int]:
        """Seconds and hit tokens of the plain schedule over RTP-LLM's NumPy form."""
        recorder = RtpRecorder(self.rtp, None, None, nobody)
        engine = RtpReplayedCache(self.rtp).engine("numpy", engine_factory("numpy"))
        replay = RtpReplay(engine, self.rtp.block_size, True, self._schedule, self._made, recorder)
        start = time.perf_counter()
        replay.run()
        return time.perf_counter() - start, _hits(recorder)

    def rtp_jax(self) -> tuple[float, int]:
        """Seconds and hit tokens of the compiled schedule over RTP-LLM's compiled form."""
        replay = rtp_compiled.RtpCompiledReplay(self.rtp, self._schedule, self._incoming, diagnose=False)
        jax.block_until_ready(replay.resident)
        start = time.perf_counter()
        replay.run()
        seconds = time.perf_counter() - start
        return seconds, _hits(replay.recorder())


def _hits(recorder: Recorder) -> int:
    return sum(request.hit for request in recorder.requests.values())


def forms_of(sides: Sides, only_compiled: bool) -> dict[str, Callable[[], tuple[float, int]]]:
    """Functions to run, by name."""
    plain = {"vllm-0.33, NumPy": sides.vllm_numpy, f"{sides.rtp.name}, NumPy": sides.rtp_numpy}
    compiled_forms = {"vllm-0.33, JAX": sides.vllm_jax, f"{sides.rtp.name}, JAX": sides.rtp_jax}
    return compiled_forms if only_compiled else {**plain, **compiled_forms}


def measure(
    forms: dict[str, Callable[[], tuple[float, int]]], block_operations: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Runs every form once to compile, then all of them in turn.

    Raises:
      ClickException: the forms of a dialect find different tokens.
    """
    hits = {name: form()[1] for name, form in forms.items()}
    for name, found in hits.items():
        other = name.replace("NumPy", "JAX")
        if found != hits[other]:
            raise click.ClickException(f"{name} finds {found} tokens, {other} {hits[other]}")
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            seconds[name].append(form()[0])
    return {
        name: {
            "hit_tokens": hits[name],
            "seconds_least": min(times),
            "seconds_median": statistics.median(times),
            "block_operations_per_second": block_operations / min(times),
            "ns_per_block_operation": min(times) / block_operations * 1e9,
        }
        for name, times in seconds.items()
    }


def read(trace: str, limit: int, block_size: int, schedule: Schedule) -> list[Arrival]:
    """The first requests of a trace that are not too long, with their keys."""
    made = []
    requests = InternedTrace(read_trace(trace, TOKENS_PER_ID, limit))
    for arrival in interned_arrivals(requests, block_size, schedule.max_model_len, Timing()):
        keys = arrival.keys()
        if arrival.prompt + arrival.output <= schedule.max_model_len:
            made.append(Arrival(len(made), arrival.step, arrival.prompt, arrival.output, lambda keys=keys: keys))
    return made


def dialect_of(groups: int, apart: bool) -> str:
    """RTP-LLM's dialect for so many groups."""
    return HYBRID_POOL if apart else HYBRID if groups > 1 else SINGLE


@click.command()
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False), help="A request trace.")
@click.option("--requests", default=300, show_default=True, type=click.IntRange(min=1), help="Its first so many.")
@click.option("--groups", default="full:64", show_default=True, help="As in `hkv replay`.")
@click.option("--apart", is_flag=True, help="RTP-LLM with a pool a group.")
@click.option(
    "--num-blocks", default=20_000, show_default=True, type=click.IntRange(min=2), help="Of the pool, or each."
)
@click.option("--compiled", "only_compiled", is_flag=True, help="Leave the NumPy forms out.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Timed runs of each form.")
@json_option
def main(
    trace: str,
    requests: int,
    groups: str,
    apart: bool,
    num_blocks: int,
    only_compiled: bool,
    repeats: int,
    json_path: str | None,
) -> None:
    """Measure both dialects, both forms, on the same requests."""
    specs = [spec_from_text(part) for part in groups.split(",")]
    schedule = Schedule()
    made = read(trace, requests, specs[0].block_size, schedule)
    sides = Sides(specs, num_blocks, dialect_of(len(specs), apart), schedule, made)
    tokens = [arrival.prompt + arrival.output for arrival in made]
    block_operations = sum(-(-count // spec.block_size) for count in tokens for spec in specs)
    result = {
        "requests": len(made),
        "groups": groups,
        "num_blocks": num_blocks,
        "block_operations": block_operations,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "forms": measure(forms_of(sides, only_compiled), block_operations, repeats),
    }
    if json_path:
        write_json(json_path, result)
    if json_path != "-":
        show(result)


def show(result: dict[str, Any]) -> None:
    """The figures, one form a line."""
    for name, value in result.items():
        if name != "forms":
            print(f"{name:18} {value}")
    for name, form in result["forms"].items():
        print(
            f"{name:28} {form['block_operations_per_second']:>14,.0f} block operations/s"
            f"  {form['ns_per_block_operation']:>10,.1f} ns each  hit tokens {form['hit_tokens']:,}"
        )


if __name__ == "__main__":
    native_loops.enable()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    try:
        main()
    except HKVError as error:
        sys.exit(f"dialects.py: {error}")

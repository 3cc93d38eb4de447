"""The same trace through vLLM's rules and RTP-LLM's: what an operation costs in the NumPy and in the compiled forms.

  python benchmarks/dialects.py --trace TRACE.jsonl --requests 300

A block operation is one block of one group through lookup, allocation, registration and release:
ceil(tokens / block size) x groups for each request, generated tokens included. The NumPy forms are driven by the plain
schedules of `hkv replay`; of vLLM's compiled form the whole schedule is one program; RTP-LLM's compiled form performs,
in one dispatch, the operations that the plain schedule asked of the NumPy form, and must answer each allocation alike.
Making keys, reading the trace and compiling are left out. Runs of all four alternate; the least time says most on a
machine that others use too.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import jax
import numpy as np

from hkv import native_loops, rtp_cache
from hkv.cli.json_output import json_option, write_json
from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE
from hkv.dialects.rtp_llm.operations import RtpBatch, RtpCode, RtpColumn
from hkv.errors import HKVError
from hkv.keys.interning import Interner
from hkv.oracle.engines.rtp_jax import VERDICTS
from hkv.oracle.replay import compiled, dispatches
from hkv.oracle.replay.chunking import Chunking
from hkv.oracle.replay.record import Recorder
from hkv.oracle.replay.rtp_record import RtpRecorder
from hkv.oracle.replay.rtp_run import keyed_rtp_engine
from hkv.oracle.replay.rtp_run import rtp_cache as rtp_config
from hkv.oracle.replay.rtp_schedule import RtpReplay
from hkv.oracle.replay.run import Timing, arrivals, cache_config, keyed_engine
from hkv.oracle.replay.schedule import Arrival, Replay, Schedule
from hkv.oracle.rtp_llm import structs
from hkv.oracle.rtp_llm.engine import KeyedRtpEngine
from hkv.oracle.traces.prefix_keys import PrefixKeys
from hkv.oracle.traces.reader import TOKENS_PER_ID, read_trace
from hkv.spec import spec_from_text
from hkv.state.status import Status

DIALECTS = (SINGLE, HYBRID, HYBRID_POOL)


class Listening:
    """An engine under RTP-LLM's rules that writes down what is asked of it, as a compiled batch.

    Args:
      engine: performs the operations.
      block_size: tokens between two keys.

    Attributes:
      batch: the operations.
      verdicts: the answers to allocations, as `(verdict, tokens reused)`.
      places: where allocations stand in the batch.
    """

    def __init__(self, engine: KeyedRtpEngine, block_size: int) -> None:
        self.batch = RtpBatch()
        self.verdicts: list[tuple[str, int]] = []
        self.places: list[int] = []
        self.slots = 0
        self.keys = Interner()
        self._engine, self._size = engine, block_size
        self._requests: dict[str, tuple[int, Sequence[int], int]] = {}
        self._free: list[int] = []

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int) -> None:
        """A request arrives in the lowest empty slot."""
        self._engine.request_keyed(id, num_tokens, keys, reserve)
        if not self._free:
            self._free.append(self.slots)
            self.slots += 1
        slot = self._free.pop()
        self._requests[id] = slot, keys, num_tokens
        numbers = self.keys.numbers(keys[: num_tokens // self._size])
        self.batch.add(RtpCode.REQUEST, slot, numbers, tokens=num_tokens, sequences=1, reserve=reserve)

    def extend(self, id: str, tokens: int) -> None:
        """Tokens are appended, and the keys of the blocks that they fill."""
        self._engine.extend(id, tokens)
        slot, keys, length = self._requests[id]
        self._requests[id] = slot, keys, length + tokens
        first = length // self._size
        numbers = self.keys.numbers(keys[first : (length + tokens) // self._size], first)
        self.batch.add(RtpCode.APPEND, slot, numbers, tokens=tokens)

    def num_available(self) -> int:
        """As the engine's."""
        return self._engine.num_available()

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        """As the engine's."""
        answer = self._engine.perform(operation)
        id = str(getattr(operation, "id", ""))
        slot, _, _ = self._requests[id]
        match operation:
            case structs.MallocOp():
                assert isinstance(answer, structs.Malloc)
                self.verdicts.append((answer.verdict, answer.reused))
                self.places.append(len(self.batch))
                self.batch.add(RtpCode.MALLOC, slot, reuse=operation.reuse, device_cache=operation.device_cache)
            case structs.InsertOp():
                self.batch.add(RtpCode.INSERT, slot)
            case structs.FreeOp():
                self.batch.add(RtpCode.FREE, slot)
            case structs.DropOp():
                self.batch.add(RtpCode.DROP, slot)
                self._free.append(slot)
                del self._requests[id]
        return answer


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
        self._sizes = compiled.Sizes.of(self.vllm, schedule, self._incoming)
        self.listened = Listening(keyed_rtp_engine("numpy", self.rtp), self.rtp.block_size)
        _, self._hits = self._rtp_over(self.listened)
        operations = self.listened.batch
        self.operations = len(operations)
        self._batch = operations.build()
        longest = max(arrival.prompt + arrival.output for arrival in made) + 1
        self._buckets = rtp_cache.buckets_for(
            self.rtp, tokens=longest, requests=self.listened.slots, sequences=1, keys=len(self.listened.keys)
        )

    def vllm_numpy(self) -> tuple[float, int]:
        """Seconds and hit tokens of the plain schedule over vLLM's NumPy form."""
        recorder = Recorder(self.vllm.num_blocks, len(self.vllm.topology.groups), None, nobody)
        engine = keyed_engine("numpy", self.vllm)
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
        return self._rtp_over(keyed_rtp_engine("numpy", self.rtp))

    def _rtp_over(self, engine: KeyedRtpEngine) -> tuple[float, int]:
        recorder = RtpRecorder(self.rtp, None, None, nobody)
        replay = RtpReplay(engine, self.rtp.block_size, True, self._schedule, self._made, recorder)
        start = time.perf_counter()
        replay.run()
        return time.perf_counter() - start, _hits(recorder)

    def rtp_jax(self) -> tuple[float, int]:
        """Seconds and hit tokens of RTP-LLM's compiled form, performing what the plain schedule asked."""
        parameters, state = jax.device_put(rtp_cache.init(self.rtp, self._buckets))
        operations = jax.device_put(self._batch)
        jax.block_until_ready((parameters, state, operations))
        start = time.perf_counter()
        _, results = jax.block_until_ready(rtp_cache.run(parameters, state, operations))
        seconds = time.perf_counter() - start
        table = np.asarray(results.table)
        for place, wanted in zip(self.listened.places, self.listened.verdicts, strict=True):
            found = VERDICTS[Status(int(table[place, RtpColumn.STATUS]))], int(table[place, RtpColumn.VALUE])
            if found != wanted:
                raise click.ClickException(f"allocation {place}: the forms differ, {wanted} and {found}")
        return seconds, self._hits


def _hits(recorder: Recorder) -> int:
    return sum(request.hit for request in recorder.requests.values())


def measure(sides: Sides, block_operations: int, repeats: int) -> dict[str, Any]:
    """Runs every form once to compile, then all of them in turn."""
    forms: dict[str, Callable[[], tuple[float, int]]] = {
        "vllm-0.33, NumPy": sides.vllm_numpy,
        f"{sides.rtp.name}, NumPy": sides.rtp_numpy,
        "vllm-0.33, JAX": sides.vllm_jax,
        f"{sides.rtp.name}, JAX": sides.rtp_jax,
    }
    hits = {name: form()[1] for name, form in forms.items()}
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
    for arrival in arrivals(read_trace(trace, TOKENS_PER_ID, limit), PrefixKeys(block_size), Timing()):
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
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Timed runs of each form.")
@json_option
def main(
    trace: str, requests: int, groups: str, apart: bool, num_blocks: int, repeats: int, json_path: str | None
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
        "rtp_operations": sides.operations,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "forms": measure(sides, block_operations, repeats),
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

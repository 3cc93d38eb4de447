"""Whole steps: `hkv.cache.step` next to vLLM's block manager, for the same work.

python benchmarks/step.py                                        # hkv alone
python benchmarks/step.py --vllm-python ~/vllm/bin/python        # and vLLM 0.33, in a process of its own
python benchmarks/step.py --arrivals                             # requests that arrive, in pools of four sizes

Three batches: every row decodes one token a step; all but one do, and that one computes a chunk of its prompt; some
rows compute a chunk each. Chunks begin inside a block. Of every row, what its query cannot read is given back, blocks
are allocated in every group, the new tokens are hashed, filled blocks are registered. `hkv.cache.step` also answers
slots; vLLM computes those on its workers, which is not timed. At the end both must hold and have null the same entries.
Both run on one thread (`hkv.serving.single_thread`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from hkv.dialects.vllm.config import VllmConfig
from hkv.model.topology import Topology
from hkv.spec import spec_from_text

SPAN = 64
"""Steps timed together where all rows decode; figures are the median of spans, and the best."""

CHUNKED_SPAN = 14
"""Steps timed together where some rows compute chunks; those rows then begin anew, which is not timed."""

CHUNK, INSIDE = 512, 5
"""Tokens of a chunk, and of those rows before their first one."""

POOLS = (1024, 65536, 262144, 1048576)
"""Blocks of the pools in which requests arrive."""

SCANNED, STEPPED = "hkv.cache.step, many steps a dispatch", "hkv.cache.step, one dispatch a step"
WHOLE = "vLLM 0.33, hashing and manager"

GROUPS = "full:16,swa:16:512,swa:16:128"
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Mix(NamedTuple):
    """A batch: rows that decode a token, and rows after them that compute a chunk."""

    name: str
    decoding: int
    chunks: int

    @property
    def span(self) -> int:
        """Steps timed together."""
        return CHUNKED_SPAN if self.chunks else SPAN

    @property
    def rows(self) -> int:
        """Rows of both sorts."""
        return self.decoding + self.chunks

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each row in a step, int32[rows]."""
        return np.array([1] * self.decoding + [CHUNK] * self.chunks, np.int32)


def mixes(rows: int) -> list[Mix]:
    """The batches of a cache of so many rows."""
    chunked = f"chunk of {CHUNK}"
    return [
        Mix(f"{rows} decodes", rows, 0),
        Mix(f"{rows - 1} decodes, one {chunked}", rows - 1, 1),
        Mix(f"8 chunks of {CHUNK}", 0, 8),
    ]


@click.command()
@click.option("--rows", default=256, show_default=True, help="Rows of the cache.")
@click.option(
    "--prompt", default=256, show_default=True, help="Tokens of each row that decodes before, a multiple of 64."
)
@click.option("--spans", default=8, show_default=True, help="Spans of steps to time, at least 2.")
@click.option("--blocks", default=65536, show_default=True, help="Blocks in the pool.")
@click.option("--groups", default=GROUPS, show_default=True, help="KIND:BLOCK[:PARAMETER],...")
@click.option("--arrivals", is_flag=True, help="Time 8 prompts of 512 tokens that hit, in pools of four sizes.")
@click.option("--vllm-python", help="An interpreter with vLLM 0.33.")
@click.option("--json", "json_path", help="Write the figures there.")
@click.option("--vllm-side", is_flag=True, hidden=True)
def main(arrivals: bool, vllm_side: bool, vllm_python: str | None, json_path: str | None, **sizes: Any) -> None:
    """Times steps of three batches."""
    if sizes["prompt"] % SPAN:
        raise click.UsageError(f"--prompt {sizes['prompt']}: a multiple of {SPAN} was expected")
    for name, least in (("rows", 2), ("spans", 2)):
        if sizes[name] < least:
            raise click.UsageError(f"--{name} {sizes[name]}: at least {least} was expected")
    if arrivals:
        report({"arrivals": {f"{n} blocks": run_arrivals(n, sizes["spans"], sizes["groups"]) for n in POOLS}})
        return
    if vllm_side:
        print(json.dumps(run_all(run_vllm, **sizes)))
        return
    found = run_all(run_hkv, **sizes)
    if vllm_python:
        theirs = ask_vllm(vllm_python, sizes)
        for name, mine in found.items():
            if theirs[name]["held"] != mine["held"]:
                raise click.ClickException(f"{name}: vLLM and hkv hold different entries; the figures do not compare")
            mine["seconds"].update(theirs[name]["seconds"])
    seconds = {name: each["seconds"] for name, each in found.items()}
    report(seconds)
    if json_path:
        from hkv.oracle.log_file import write_atomically

        write_atomically(json_path, json.dumps({**sizes, "seconds": seconds}, indent=2).encode())


def run_all(run: Callable[..., dict[str, Any]], rows: int, **sizes: Any) -> dict[str, Any]:
    """The figures of every batch by name."""
    return {mix.name: run(mix, **sizes) for mix in mixes(rows)}


def config_of(groups: str, blocks: int) -> VllmConfig:
    specs = [spec_from_text(text) for text in groups.split(",")]
    sizes = {spec.block_size for spec in specs}
    return VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=blocks,
        hash_block_size=min(sizes),
        scheduler_block_size=int(np.lcm.reduce(list(sizes))),
        max_model_len=1 << 15,
    )


def token_table(mix: Mix, steps: int) -> np.ndarray:
    """int32[steps, tokens]: the tokens of every step, row after row; the same for both sides."""
    return np.random.default_rng(0).integers(0, 50_000, (steps, int(mix.counts.sum()))).astype(np.int32)


def run_hkv(mix: Mix, prompt: int, spans: int, blocks: int, groups: str) -> dict[str, Any]:
    import jax

    from hkv.cache import step as serving
    from hkv.cache.state import StepBatch, StepRequest, StepRow
    from hkv.keys.fingerprint import ROOT as FIRST_KEY
    from hkv.serving import single_thread

    single_thread.enable()
    config = config_of(groups, blocks)
    steps = spans * mix.span
    tokens, before = token_table(mix, steps), np.zeros((prompt, mix.decoding), np.int32)
    width = -(-(max(prompt + 2 * steps, INSIDE + CHUNK * mix.span)) // min(config.block_sizes)) + 1
    parameters, empty = serving.init(config, rows=mix.rows, row=width)
    parameters = jax.device_put(parameters)
    up, zeros = np.arange(mix.rows, dtype=np.int32), np.zeros(mix.rows, np.int32)

    def batch(counts: np.ndarray, new: Any) -> StepBatch:
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return StepBatch(new, *jax.device_put((ends, up, zeros, zeros)))

    def one(counts: np.ndarray) -> Any:
        room = serving.room_for(config, queries=mix.rows, tokens=int(counts.sum()))

        def stepped(state: Any, new: Any) -> tuple[Any, Any]:
            state, result = serving.step(parameters, state, batch(counts, new), room=room)
            return state, result.status.max()

        return jax.jit(functools.partial(jax.lax.scan, stepped), donate_argnums=0), serving.specialised(
            parameters, room
        )

    def checked(answer: tuple[Any, Any]) -> Any:
        state, status = answer
        assert not np.asarray(status).any(), "a row was refused"
        return state

    many, single = one(mix.counts)
    first = np.array([1] * mix.decoding + [0] * mix.chunks, np.int32)
    begun = np.array([0] * mix.decoding + [INSIDE] * mix.chunks, np.int32)
    chunked = np.where(up >= mix.decoding, up, -1).astype(np.int32)
    roots = np.tile(np.array(FIRST_KEY, np.uint32), (mix.rows, 1))

    def anew(state: Any) -> Any:
        """The rows of chunks begin anew, with a few tokens."""
        if not mix.chunks:
            return state
        state, _ = serving.finish(state, chunked)
        state = checked(serving.start(state, chunked, roots))
        return checked(one(begun)[0](state, np.ones((1, INSIDE * mix.chunks), np.int32)))

    def by_step(state: Any, table: np.ndarray) -> Any:
        ends = batch(mix.counts, None)
        for new in table:
            state, result = single(state, dataclasses.replace(ends, tokens=new))
            assert not np.asarray(result.status).any(), "a row was refused"
        return state

    state, _ = serving.start(empty, up, roots)
    if mix.decoding and prompt:
        state = checked(one(first)[0](state, before))
    seconds: dict[str, list[float]] = {}
    held = None
    ways = {SCANNED: lambda state, table: checked(many(state, table)), STEPPED: by_step}
    for name, run in ways.items():
        times = []
        for at in range(0, steps, mix.span):
            state = jax.block_until_ready(anew(state))
            start = time.perf_counter()
            state = run(state, tokens[at : at + mix.span])
            times.append((time.perf_counter() - start) / mix.span)
        seconds[name] = times[1:]  # the first one compiles
        if held is None:
            lengths = np.asarray(state.requests)[:, len(StepRequest) + StepRow.LENGTH * len(config.block_sizes) :]
            used = np.count_nonzero(np.asarray(state.rows), axis=(0, 2))
            held = [[int(lengths[:, g].sum()), int(used[g])] for g in range(len(config.block_sizes))]
    return {"seconds": seconds, "held": held}


def run_arrivals(blocks: int, spans: int, groups: str) -> list[float]:
    """Seconds of each of `spans` arrivals of prompts that were computed before, in a pool of so many blocks."""
    import jax

    from hkv.cache import arrivals
    from hkv.cache import step as serving
    from hkv.cache.state import StepBatch
    from hkv.keys.fingerprint import ROOT as FIRST_KEY
    from hkv.serving import single_thread

    single_thread.enable()
    config, count = config_of(groups, blocks), 8
    rows, counts = np.arange(count, dtype=np.int32), np.full(count, CHUNK, np.int32)
    tokens = np.random.default_rng(0).integers(0, 50_000, (count, CHUNK)).astype(np.int32)
    roots = np.tile(np.array(FIRST_KEY, np.uint32), (count, 1))
    parameters, state = serving.init(config, rows=count, row=CHUNK // min(config.block_sizes) + 1)
    state, _ = serving.start(state, rows, roots)
    ends = np.arange(0, count * CHUNK + 1, CHUNK, dtype=np.int32)
    room = serving.room_for(config, queries=count, tokens=count * CHUNK)
    batch = StepBatch(*jax.device_put((tokens.reshape(-1), ends, rows, 0 * rows, 0 * rows)))
    arrive = arrivals.specialised(parameters)
    coming = arrivals.Arrivals(*jax.device_put((rows, roots, tokens, counts)))
    state, result = serving.jitted(room)(parameters, state, batch)
    assert not np.asarray(result.status).any(), "a row was refused"
    times = []
    for _ in range(spans + 1):
        state = jax.block_until_ready(serving.finish(state, rows)[0])
        start = time.perf_counter()
        state, found = arrive(state, coming)
        assert np.asarray(found.hits).all(), "a prompt was not found"
        times.append(time.perf_counter() - start)
    return times[1:]  # the first one compiles


def run_vllm(mix: Mix, prompt: int, spans: int, blocks: int, groups: str) -> dict[str, Any]:
    import gc

    from hkv.dialects.vllm.engines import vllm_objects

    config = config_of(groups, blocks)
    tokens = token_table(mix, spans * mix.span)
    function, hasher = vllm_objects.hasher(config)
    vllm_objects.use_none_hash(function)
    manager = vllm_objects.manager(config)
    manager.block_pool.enable_kv_cache_events = False

    def compute(request: Any, count: int) -> None:
        assert manager.allocate_slots(request, count) is not None, "a request was refused"
        request.num_computed_tokens += count

    requests = [vllm_objects.request(f"r{row}", [0] * prompt, None, hasher) for row in range(mix.decoding)]
    for request in requests:
        compute(request, prompt)
        vllm_objects.set_running(request)
    chunked: list[Any] = []
    gc.collect()
    gc.freeze()
    whole, alone = [], []
    for span, at in enumerate(range(0, len(tokens), mix.span)):
        for request in chunked:
            manager.free(request)
        prompts = tokens[at : at + mix.span, mix.decoding :].reshape(mix.span, mix.chunks, CHUNK).swapaxes(0, 1)
        texts = [[1] * INSIDE + prompt.reshape(-1).tolist() for prompt in prompts]
        inside = 0.0
        start = time.perf_counter()
        # A request hashes its whole prompt when it is made.
        chunked = [vllm_objects.request(f"c{span}.{i}", text, None, hasher) for i, text in enumerate(texts)]
        hashing = time.perf_counter() - start
        for request in chunked:
            compute(request, INSIDE)
            vllm_objects.set_running(request)
        start = time.perf_counter()
        for new in tokens[at : at + mix.span, : mix.decoding].tolist():
            manager.new_step_starts()
            for request, token in zip(requests, new, strict=True):
                request.append_output_token_ids(token)
            begun = time.perf_counter()
            for request in requests:
                assert manager.allocate_slots(request, 1) is not None
            for request in chunked:
                assert manager.allocate_slots(request, CHUNK) is not None
            inside += time.perf_counter() - begun
            for request in requests:
                request.num_computed_tokens += 1
            for request in chunked:
                request.num_computed_tokens += CHUNK
        whole.append((time.perf_counter() - start + hashing) / mix.span)
        alone.append(inside / mix.span)
    held = []
    for group in range(len(config.block_sizes)):
        rows_of = [manager.get_block_ids(request.request_id)[group] for request in (*requests, *chunked)]
        held.append([sum(map(len, rows_of)), sum(block != 0 for row in rows_of for block in row)])
    return {"seconds": {WHOLE: whole[1:], "vLLM 0.33, manager alone": alone[1:]}, "held": held}


def ask_vllm(python: str, sizes: dict[str, Any]) -> dict[str, Any]:
    options = [f"--{name}={value}" for name, value in sizes.items()]
    quiet = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **quiet, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    command = [python, str(pathlib.Path(__file__).resolve()), "--vllm-side", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{python} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(found: dict[str, dict[str, list[float]]]) -> None:
    for batch, seconds in found.items():
        theirs = seconds.get(WHOLE)
        table = Table("", "median ms a step", "best", "steps a second", "of vLLM's", title=batch)
        for name, times in seconds.items():
            median = statistics.median(times)
            ratio = f"{statistics.median(theirs) / median:.1f} x" if theirs else "-"
            table.add_row(name, f"{median * 1e3:.3f}", f"{min(times) * 1e3:.3f}", f"{1 / median:,.0f}", ratio)
        Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    main()

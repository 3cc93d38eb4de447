"""Whole decode steps: `hkv.cache.step` beside vLLM's block manager, for the same work.

python benchmarks/step.py                                        # hkv alone
python benchmarks/step.py --vllm-python ~/vllm/bin/python        # and vLLM 0.33, in a process of its own

Every row computes one token a step: what its query cannot read is given back, blocks are allocated in every group, the
new token is hashed, filled blocks are registered. `hkv.cache.step` also answers slots; vLLM computes those on its
workers, which is not timed. At the end both must hold and have null the same entries. Both run on one thread
(`hkv.cache.single_thread`).
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from hkv.dialects.vllm.config import VllmConfig
from hkv.model.topology import Topology
from hkv.spec import spec_from_text

CHUNK = 64
"""Steps timed together; figures are the median of chunks, and the best."""

GROUPS = "full:16,swa:16:512,swa:16:128"
ROOT = pathlib.Path(__file__).resolve().parent.parent


@click.command()
@click.option("--rows", default=256, show_default=True, help="Requests that decode.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of each row before, a multiple of 64.")
@click.option("--steps", default=512, show_default=True, help=f"Steps to time, a multiple of {CHUNK}.")
@click.option("--blocks", default=65536, show_default=True, help="Blocks in the pool.")
@click.option("--groups", default=GROUPS, show_default=True, help="KIND:BLOCK[:PARAMETER],...")
@click.option("--vllm-python", help="An interpreter with vLLM 0.33.")
@click.option("--json", "json_path", help="Write the figures there.")
@click.option("--vllm-side", is_flag=True, hidden=True)
def main(vllm_side: bool, vllm_python: str | None, json_path: str | None, **sizes: Any) -> None:
    """Times decode steps."""
    for name in ("prompt", "steps"):
        if sizes[name] % CHUNK or sizes[name] < 2 * CHUNK:
            raise click.UsageError(f"--{name} {sizes[name]}: a multiple of {CHUNK}, at least {2 * CHUNK}, was expected")
    if vllm_side:
        print(json.dumps(run_vllm(**sizes)))
        return
    found = run_hkv(**sizes)
    if vllm_python:
        theirs = ask_vllm(vllm_python, sizes)
        if theirs.pop("held") != found["held"]:
            raise click.ClickException("vLLM and hkv hold different entries: the figures do not compare")
        found["seconds"].update(theirs["seconds"])
    del found["held"]
    report(found["seconds"])
    if json_path:
        from hkv.oracle.atomic import write_atomically

        write_atomically(json_path, json.dumps({**sizes, **found}, indent=2).encode())


def config_of(groups: str, blocks: int) -> VllmConfig:
    specs = [spec_from_text(text) for text in groups.split(",")]
    sizes = {spec.block_size for spec in specs}
    return VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=blocks,
        hash_block_size=min(sizes),
        scheduler_block_size=int(np.lcm.reduce(list(sizes))),
        max_model_len=8192,
    )


def token_table(rows: int, length: int) -> np.ndarray:
    """int32[length, rows]: what every row reads, the same for both sides and different for each row."""
    return np.random.default_rng(0).integers(0, 50_000, (length, rows)).astype(np.int32)


def run_hkv(rows: int, prompt: int, steps: int, blocks: int, groups: str) -> dict[str, Any]:
    import jax

    from hkv.cache import single_thread
    from hkv.cache import step as serving
    from hkv.cache.state import StepBatch, StepRequest, StepRow
    from hkv.keys.fingerprint import ROOT as FIRST_KEY

    single_thread.enable()
    config = config_of(groups, blocks)
    tokens = token_table(rows, prompt + 2 * steps)
    room = serving.room_for(config, rows=rows, tokens=1)
    width = -(-tokens.shape[0] // min(config.block_sizes)) + 1
    parameters, empty = serving.init(config, rows=rows, row=width)
    parameters = jax.device_put(parameters)
    ones, zeros = jax.device_put((np.ones(rows, np.int32), np.zeros(rows, np.int32)))

    def one(state: Any, new: Any) -> tuple[Any, Any]:
        state, result = serving.step(parameters, state, StepBatch(new[:, None], ones, zeros, zeros), room=room)
        return state, result.status.max()

    many = jax.jit(functools.partial(jax.lax.scan, one), donate_argnums=0)
    state, _ = serving.start(empty, np.arange(rows, dtype=np.int32), np.tile(np.array(FIRST_KEY, np.uint32), (rows, 1)))
    for first in range(0, prompt, CHUNK):
        state, status = many(state, tokens[first : first + CHUNK])
        assert not np.asarray(status).any(), "a row was refused"
    single = serving.jitted(room)

    def by_step(state: Any, first: int) -> Any:
        for new in tokens[first : first + CHUNK]:
            state, result = single(parameters, state, StepBatch(new[:, None], ones, zeros, zeros))
            assert not np.asarray(result.status).any(), "a row was refused"
        return state

    def by_scan(state: Any, first: int) -> Any:
        state, status = many(state, tokens[first : first + CHUNK])
        assert not np.asarray(status).any(), "a row was refused"
        return state

    seconds: dict[str, list[float]] = {}
    at, held = prompt, None
    for name, run in (
        ("hkv.cache.step, many steps a dispatch", by_scan),
        ("hkv.cache.step, one dispatch a step", by_step),
    ):
        times = []
        for _ in range(steps // CHUNK):
            start = time.perf_counter()
            state = run(state, at)
            times.append((time.perf_counter() - start) / CHUNK)
            at += CHUNK
        # The first chunk of single steps compiles.
        seconds[name] = times[1:] if run is by_step else times
        if held is None:
            lengths = np.asarray(state.requests)[:, len(StepRequest) + StepRow.LENGTH * len(config.block_sizes) :]
            used = np.count_nonzero(np.asarray(state.rows), axis=(0, 2))
            held = [[int(lengths[:, g].sum()), int(used[g])] for g in range(len(config.block_sizes))]
    return {"seconds": seconds, "held": held}


def run_vllm(rows: int, prompt: int, steps: int, blocks: int, groups: str) -> dict[str, Any]:
    import gc

    from hkv.dialects.vllm.engines import vllm_objects

    config = config_of(groups, blocks)
    tokens = token_table(rows, prompt + 2 * steps)
    function, hasher = vllm_objects.hasher(config)
    vllm_objects.use_none_hash(function)
    manager = vllm_objects.manager(config)
    manager.block_pool.enable_kv_cache_events = False
    requests = []
    for row in range(rows):
        request = vllm_objects.request(f"r{row}", tokens[:prompt, row].tolist(), None, hasher)
        assert manager.allocate_slots(request, prompt) is not None
        request.num_computed_tokens = prompt
        vllm_objects.set_running(request)
        requests.append(request)
    gc.collect()
    gc.freeze()
    whole, alone = [], []
    for first in range(prompt, prompt + steps, CHUNK):
        inside = 0.0
        start = time.perf_counter()
        for new in tokens[first : first + CHUNK].tolist():
            manager.new_step_starts()
            for request, token in zip(requests, new, strict=True):
                request.append_output_token_ids(token)
            begun = time.perf_counter()
            for request in requests:
                assert manager.allocate_slots(request, 1) is not None
            inside += time.perf_counter() - begun
            for request in requests:
                request.num_computed_tokens += 1
        whole.append((time.perf_counter() - start) / CHUNK)
        alone.append(inside / CHUNK)
    held = []
    for group in range(len(config.block_sizes)):
        rows_of = [manager.get_block_ids(request.request_id)[group] for request in requests]
        held.append([sum(map(len, rows_of)), sum(block != 0 for row in rows_of for block in row)])
    return {"seconds": {"vLLM 0.33, hashing and manager": whole, "vLLM 0.33, manager alone": alone}, "held": held}


def ask_vllm(python: str, sizes: dict[str, Any]) -> dict[str, Any]:
    options = [f"--{name}={value}" for name, value in sizes.items()]
    quiet = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **quiet, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    command = [python, str(pathlib.Path(__file__).resolve()), "--vllm-side", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{python} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(seconds: dict[str, list[float]]) -> None:
    theirs = seconds.get("vLLM 0.33, hashing and manager")
    table = Table("", "median ms a step", "best", "steps a second", "of vLLM's")
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio = f"{statistics.median(theirs) / median:.1f} x" if theirs else "-"
        table.add_row(name, f"{median * 1e3:.3f}", f"{min(times) * 1e3:.3f}", f"{1 / median:,.0f}", ratio)
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    main()

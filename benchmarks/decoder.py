"""The example decoder with its cache in `jit`, beside the same model with the NumPy manager on the host.

python benchmarks/decoder.py

Both decode the same prompts greedily, one token a row and step, with the same compiled layers over the same pages, and
must say the same tokens. In `jit` the cache is part of the loop. On the host `reference.step` manages blocks, keys and
eviction in Python, NumPy tables go to the device, and the new tokens come back, step by step, as JAX engines do it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from examples.hybrid_decoder.model import DELTA, Model
from examples.hybrid_decoder.paged import Addresses, forward
from examples.hybrid_decoder.serving import Decoder, Request
from reference.step import Rows

REPEATS = 4
"""Stretches of steps timed; figures are their median, and the best."""


@click.command()
@click.option("--rows", default=16, show_default=True, help="Requests that decode.")
@click.option("--prompt", default=16, show_default=True, help="Tokens of each before.")
@click.option("--steps", default=48, show_default=True, help=f"Steps of each of {REPEATS} stretches.")
@click.option("--heads", default=4, show_default=True, help="Query heads of 16 elements.")
@click.option("--json", "json_path", help="Write the figures there.")
def main(rows: int, prompt: int, steps: int, heads: int, json_path: str | None) -> None:
    """Times decoding with the cache in `jit`, and with the cache on the host."""
    for name, value in {"rows": rows, "prompt": prompt, "steps": steps}.items():
        if value < 1:
            raise click.UsageError(f"--{name} {value}: a positive number was expected")
    if heads < 2 or heads % 2:
        raise click.UsageError(f"--heads {heads}: an even number was expected")
    model = Model(longest=prompt + REPEATS * steps + 2, heads=heads, block=4)
    prompts = np.random.default_rng(0).integers(0, model.vocabulary, (rows, prompt)).astype(np.int32)
    blocks = 2 * rows * len(model.kinds) * (model.longest // model.block + 1)
    inside, first = in_jit(model, prompts, steps, blocks)
    outside, managing, second = on_host(model, prompts, steps, blocks)
    if not np.array_equal(first, second):
        raise click.ClickException("the two say different tokens: the figures do not compare")
    seconds = {"cache in jit": inside, "cache on the host": outside, "  of which the manager": managing}
    report(seconds, rows)
    if json_path:
        from hkv.oracle.atomic import write_atomically

        found = {"rows": rows, "prompt": prompt, "steps": steps, "heads": heads, "seconds_a_step": seconds}
        write_atomically(json_path, json.dumps(found, indent=2).encode())


def in_jit(model: Model, prompts: np.ndarray, steps: int, blocks: int) -> tuple[list[float], np.ndarray]:
    """Seconds a step of each stretch, and the tokens int32[rows, N] that came out."""
    rows, prompt = prompts.shape
    decoder = Decoder(model, rows, blocks, chunk=1)
    decoder.arrive({row: Request(prompts[row].tolist(), prompt + 1) for row in range(rows)})
    assert not decoder.run(), "a row was refused"
    times = []
    for stretch in range(1, REPEATS + 1):
        target = jnp.full(rows, prompt + 1 + stretch * steps, jnp.int32)
        decoder.carry = decoder.carry._replace(rows=decoder.carry.rows._replace(target=target))
        start = time.perf_counter()
        assert not decoder.run(), "a row was refused"
        times.append((time.perf_counter() - start) / steps)
    return times, np.asarray(decoder.carry.rows.history)[:, : prompt + 1 + REPEATS * steps]


def on_host(model: Model, prompts: np.ndarray, steps: int, blocks: int) -> tuple[list[float], list[float], np.ndarray]:
    """Seconds a step of each stretch, those of them that the manager and its tables take, and the tokens."""
    rows, prompt = prompts.shape
    decoder = Decoder(model, rows, blocks, chunk=1)
    manager = Rows(decoder.config, rows, decoder.carry.cache.rows.shape[2])
    for row in range(rows):
        manager.start(row)
    run = compiled(model, decoder.plan.by_kind)
    weights, pool = decoder.weights, decoder.carry.pool
    history = np.zeros((rows, prompt + 1 + REPEATS * steps), np.int32)
    history[:, :prompt] = prompts
    times, managing = [], []
    for stretch in range(REPEATS + 1):
        first, last = (0, prompt) if stretch == 0 else (prompt + (stretch - 1) * steps, prompt + stretch * steps)
        start, inside = time.perf_counter(), 0.0
        for position in range(first, last):
            begun = time.perf_counter()
            where = addresses(model, manager, history[:, position], position)
            inside += time.perf_counter() - begun
            said, pool = run(weights, pool, history[:, position : position + 1], where)
            new = np.asarray(said)
            if position + 1 >= prompt:
                history[:, position + 1] = new
        times.append((time.perf_counter() - start) / (last - first))
        managing.append(inside / (last - first))
    return times[1:], managing[1:], history


def compiled(model: Model, layouts: Any) -> Any:
    """The layers of one token a row, and the next tokens; the pool is donated."""

    def one(weights: Any, pool: jax.Array, tokens: jax.Array, where: Addresses) -> tuple[jax.Array, jax.Array]:
        logits, pool, _ = forward(model, layouts, weights, pool, tokens, where, True)
        return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), pool

    return jax.jit(one, donate_argnums=1)


def addresses(model: Model, manager: Rows, tokens: np.ndarray, position: int) -> Addresses:
    """A step of the manager on the host, and what the layers have to know of it."""
    rows = len(tokens)
    zeros = [0] * rows
    status = manager.step([[token] for token in tokens.tolist()], zeros, zeros, interleaved=True)
    assert not any(status), "a row was refused"
    tables = np.zeros((rows, len(model.kinds), manager.width), np.int32)
    blocks = np.zeros((rows, len(model.kinds), 1), np.int32)
    states = np.full(rows, -1, np.int32)
    columns = [position // model.block_of(kind) for kind in model.kinds]
    for row in range(rows):
        for group, held in enumerate(manager.manager.rows(manager.names[row] or "")):
            tables[row, group, : len(held)] = held
            blocks[row, group, 0] = held[columns[group]]
    if DELTA in model.kinds:
        states = blocks[:, model.group(DELTA), 0]
    offsets = np.array([position % model.block_of(kind) for kind in model.kinds], np.int32)
    offsets = np.broadcast_to(offsets[:, None], blocks.shape)
    start = np.full(rows, position, np.int32)
    return Addresses(tables, blocks, offsets, start, np.ones(rows, np.int32), states)  # type: ignore[arg-type]


def report(seconds: dict[str, list[float]], rows: int) -> None:
    """A table of the figures."""
    table = Table("", "median ms a step", "best", "tokens a second", "")
    base = statistics.median(seconds["cache on the host"])
    for name, times in seconds.items():
        median = statistics.median(times)
        table.add_row(
            name, f"{median * 1e3:.2f}", f"{min(times) * 1e3:.2f}", f"{rows / median:,.0f}", f"{base / median:.1f} x"
        )
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    main()

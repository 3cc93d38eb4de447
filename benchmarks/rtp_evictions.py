"""Cost of an eviction under RTP-LLM's rules by the number of cached keys, with and without the prefix tree, compiled.

python benchmarks/rtp_evictions.py
python benchmarks/rtp_evictions.py --keys 1000 --keys 1000000 --repeats 30

Chains of four keys in drawn order, each with a block of full attention and a state, fill the cache; then `EVICTIONS`
times at least one block is evicted, in one dispatch. With the tree each takes a chain, without it a key. The time of a
dispatch that does nothing is taken off, and the least time of several runs says most. The ratio is to the first cache.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from hkv.cli.output_option import json_option, write_json
from hkv.dialects.rtp_llm import machine
from hkv.dialects.rtp_llm.config import HYBRID
from hkv.dialects.rtp_llm.rules.operations import RtpArgument, RtpCode, RtpColumn
from hkv.dialects.rtp_llm.schedule.run import rtp_cache
from hkv.machine import native_loops
from hkv.machine.operations import WIDTH, Operations
from hkv.spec import spec_from_text
from hkv.state.pooled import Counter

CHAIN, BLOCK = 4, 16
"""Keys of a chain, and tokens of a block."""

EVICTIONS = 200
"""Of one dispatch; the smallest cache has more chains."""


def filling(keys: int) -> Operations:
    """Requests that come, are cached and go, one chain of keys each."""
    drawn = np.random.default_rng(0).permutation(keys).astype(np.int32)
    rows = []
    for start in range(0, keys, CHAIN):
        for code, more in (
            (RtpCode.REQUEST, {"TOKENS": CHAIN * BLOCK, "SEQUENCES": 1, "NUMBERS": CHAIN, "START": start}),
            (RtpCode.MALLOC, {"REUSE": 1}),
            (RtpCode.INSERT, {}),
            (RtpCode.FREE, {}),
            (RtpCode.DROP, {}),
        ):
            row = np.zeros(WIDTH, np.int32)
            row[RtpArgument.CODE] = code
            for name, value in more.items():
                row[RtpArgument[name]] = value
            rows.append(row)
    return Operations(table=np.stack(rows), payload=drawn)  # type: ignore[arg-type]


def evicting(count: int) -> Operations:
    """So many evictions of at least a block each, among `EVICTIONS` rows."""
    table = np.zeros((EVICTIONS, WIDTH), np.int32)
    table[:count, RtpArgument.CODE], table[:count, RtpArgument.LEAST] = RtpCode.EVICT, 1
    return Operations(table=table, payload=np.zeros(1, np.int32))  # type: ignore[arg-type]


def measure(keys: int, tree: bool, repeats: int) -> dict[str, Any]:
    """Nanoseconds of an eviction out of a cache of so many keys.

    Raises:
      ClickException: an operation was refused, or other than whole chains, or keys, left.
    """
    specs = [spec_from_text(f"{kind}:{BLOCK}") for kind in ("full", "mamba")]
    config = rtp_cache(HYBRID, specs, [2 * keys + 64], reserve_ratio=0, prefix_tree=tree)
    sizes = machine.buckets_for(config, tokens=CHAIN * BLOCK, requests=1, sequences=1, keys=keys)
    parameters, state = jax.device_put(machine.init(config, sizes))
    fill = tuple(code for code in machine.ALL if code < RtpCode.FORK or code in (RtpCode.FREE, RtpCode.DROP))
    full, results = machine.run(parameters, state, jax.device_put(filling(keys)), only=fill)
    machine.check(results)
    blocks = 2 * CHAIN if tree else 2
    times: dict[int, list[float]] = {EVICTIONS: [], 0: []}
    for turn in range(repeats + 1):
        for count, found in times.items():
            operations = jax.device_put(evicting(count))
            copy = jax.block_until_ready(jax.tree.map(jnp.copy, full))
            start = time.perf_counter()
            after, results = jax.block_until_ready(machine.run(parameters, copy, operations, only=(RtpCode.EVICT,)))
            found += [time.perf_counter() - start] * (turn > 0)
            left = int(after.counters[Counter.EVICTIONS])
            if left != blocks * count or np.any(results.table[:count, RtpColumn.VALUE] != blocks):
                raise click.ClickException(f"{left} blocks left in {count} evictions, not {blocks} in each")
    spent = (min(times[EVICTIONS]) - min(times[0])) / EVICTIONS
    return {"keys": keys, "tree": tree, "blocks": blocks, "ns_per_eviction": spent * 1e9}


def with_ratios(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures, each with its ratio to the first of its kind."""
    first = {each["tree"]: each["ns_per_eviction"] for each in reversed(found)}
    return [{**each, "ratio": each["ns_per_eviction"] / first[each["tree"]]} for each in found]


@click.command()
@click.option(
    "--keys",
    multiple=True,
    default=(1_000, 10_000, 100_000),
    show_default=True,
    type=click.IntRange(min=CHAIN * EVICTIONS),
    help="Cached keys; may be given again.",
)
@click.option("--repeats", default=20, show_default=True, type=click.IntRange(min=1), help="Timed runs of each.")
@json_option
def main(keys: tuple[int, ...], repeats: int, json_path: str | None) -> None:
    """Measure an eviction against the cache's size."""
    result = with_ratios([measure(each - each % CHAIN, tree, repeats) for tree in (True, False) for each in keys])
    if json_path:
        write_json(json_path, {"jax": jax.__version__, "evictions": result})
    if json_path != "-":
        for each in result:
            told = "{keys:>9,} keys {ns_per_eviction:8.0f} ns an eviction of {blocks} blocks, {ratio:5.2f} of the first"
            print("tree" if each["tree"] else "flat", told.format(**each))


if __name__ == "__main__":
    native_loops.enable()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    main()

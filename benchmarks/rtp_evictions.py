"""Cost of an eviction under RTP-LLM's rules by the number of cached keys, with and without the prefix tree, compiled.

python -m benchmarks.rtp_evictions
python -m benchmarks.rtp_evictions --keys 1000 --keys 1000000 --repeats 30

Chains of four keys in drawn order, each with a block of full attention and a state, fill the cache; then `EVICTIONS`
times at least one block is evicted, in one dispatch. With the tree each takes a chain, without it a key. The time of a
dispatch that does nothing is taken off, and the least time of several runs says most. The ratio is to the first cache.
"""

from __future__ import annotations

import time
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from hkv.cli.output_option import json_option, write_json
from hkv.dialects.rtp_llm.config import HYBRID
from hkv.dialects.rtp_llm.plain import LAYOUT, empty_arrays, settings
from hkv.dialects.rtp_llm.schedule.run import rtp_cache
from hkv.lowering.programs import Program
from hkv.machine import native_loops
from hkv.spec import spec_from_text
from reference.dialects.rtp_llm.operations import perform_all
from reference.dialects.rtp_llm.records import Code, Status
from tests.rtp_llm.batches import Batch

CHAIN, BLOCK = 4, 16
"""Keys of a chain, and tokens of a block."""

EVICTIONS = 200
"""Of one dispatch; the smallest cache has more chains."""


def filling(keys: int) -> Batch:
    """Requests that come, are cached and go, one chain of keys each."""
    drawn, batch = np.random.default_rng(0).permutation(keys).tolist(), Batch()
    for start in range(0, keys, CHAIN):
        batch.add(Code.REQUEST, 0, drawn[start : start + CHAIN], tokens=CHAIN * BLOCK, sequences=1)
        batch.add(Code.MALLOC, reuse=1).add(Code.INSERT).add(Code.FREE).add(Code.DROP)
    return batch


def measure(keys: int, tree: bool, repeats: int) -> dict[str, Any]:
    """Nanoseconds of an eviction out of a cache of so many keys.

    Raises:
      ClickException: an operation was refused, or other than whole chains, or keys, left.
    """
    specs = [spec_from_text(f"{kind}:{BLOCK}") for kind in ("full", "mamba")]
    config = rtp_cache(HYBRID, specs, [2 * keys + 64], reserve_ratio=0, prefix_tree=tree)
    static, fill = settings(config), filling(keys)
    room = {"operations": len(fill), "payload": keys + 1, "told": 2 * CHAIN}
    empty = empty_arrays(config, keys=keys, slots=1, batch=1, row=CHAIN + 2, **room)
    program = Program(LAYOUT, perform_all, static)
    full = program(fill.into({name: array for name, array in empty.items() if name not in static}), len(fill))
    if np.any(full["results.status"][1:] != Status.OK):
        raise click.ClickException("an operation was refused")
    evicting = Batch()
    for _ in range(EVICTIONS):
        evicting.add(Code.EVICT, least=1)
    full = jax.device_put(evicting.into(full))
    blocks = 2 * CHAIN if tree else 2
    times: dict[int, list[float]] = {EVICTIONS: [], 0: []}
    for turn in range(repeats + 1):
        for count, found in times.items():
            copy = jax.block_until_ready(jax.tree.map(jnp.copy, full))
            start = time.perf_counter()
            after = jax.block_until_ready(program(copy, count))
            found += [time.perf_counter() - start] * (turn > 0)
            left = int(after["evictions"])
            if left != blocks * count or np.any(after["results.value"][1 : count + 1] != blocks):
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
    main()

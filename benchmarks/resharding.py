"""Moving a request between parallel shapes, by the plan and by `device_put` of whole arrays: seconds and bytes.

`python benchmarks/resharding.py` forces eight CPU devices and needs no other. For each pair of shapes it moves one
request in two ways and prints the least of several times:

* plan: `hkv.mesh.transfer.execute`, a packet for each pair of ranks; planning is timed apart;
* arrays: tokens assembled over the context ranks, heads left where they are, one `device_put` to the target's mesh with
  heads as that mesh splits them, and written there.

That both, and the plan's byte runs copied on the host, leave the same bytes is checked first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable

FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), FLAG])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from hkv.layout.block_layout import Layout  # noqa: E402
from hkv.mesh import sharding  # noqa: E402
from hkv.mesh.parallel_shape import ParallelShape  # noqa: E402
from hkv.mesh.resharding import Plan, Side, plan_resharding  # noqa: E402
from hkv.mesh.sharding import ShardedLayout, make_mesh  # noqa: E402
from hkv.mesh.transfer import execute  # noqa: E402
from hkv.spec import FullAttention  # noqa: E402

BLOCK = 16
PAIRS = {
    "tensor 4 -> tensor 2": (ParallelShape(heads=8, tensor=4), ParallelShape(heads=8, tensor=2)),
    "tensor 2 -> tensor 4": (ParallelShape(heads=8, tensor=2), ParallelShape(heads=8, tensor=4)),
    "tensor 4 of 1 head -> tensor 4": (ParallelShape(heads=1, tensor=4), ParallelShape(heads=1, tensor=4)),
    "tensor 4 -> context 4, by 16": (
        ParallelShape(heads=8, tensor=4),
        ParallelShape(heads=8, context=4, interleave=BLOCK),
    ),
    "tensor 4 -> tensor 2, context 2, by 1": (
        ParallelShape(heads=8, tensor=4),
        ParallelShape(heads=8, tensor=2, context=2, interleave=1),
    ),
}


@dataclasses.dataclass(frozen=True)
class Move:
    """A request to move, with its pools."""

    plan: Plan
    source: ShardedLayout
    target: ShardedLayout
    have: jax.Array
    tokens: int
    planning: float

    def empty(self) -> jax.Array:
        return self.target.zeros(self.target.layout.end // 4)


def make(shapes: tuple[ParallelShape, ParallelShape], tokens: int, layers: int) -> Move:
    sides: list[Side] = []
    places: list[ShardedLayout] = []
    for shape, devices in zip(shapes, (jax.devices()[:4], jax.devices()[4:]), strict=True):
        spec = FullAttention(block_size=BLOCK, num_kv_heads=shape.heads_per_rank, head_size=128)
        columns = -(-tokens // (BLOCK * shape.token_ranks))
        layout = Layout.of_spec(spec, "LBHNC", num_blocks=columns + 1, num_layers=layers)
        row = tuple(int(block) for block in 1 + np.random.default_rng(len(sides)).permutation(columns))
        sides.append(Side(shape=shape, layout=layout, row=row))
        count = shape.tensor * shape.context
        places.append(ShardedLayout(make_mesh(shape, devices[:count]), shape, layout))
    (source, target), (here, there) = sides, places
    have = content(source, here, tokens)
    start = time.perf_counter()
    plan = plan_resharding(source, target, range(tokens))
    return Move(plan, here, there, have, tokens, time.perf_counter() - start)


def content(side: Side, place: ShardedLayout, tokens: int) -> jax.Array:
    """A pool in which every replica holds the same: random values, written."""
    pool = place.zeros(place.layout.end // 4)
    span = side.shape.virtual_states(side.layout)
    blocks = np.array([[side.row[token // span] for token in range(tokens)]], np.int32)
    states = np.array([[token % span for token in range(tokens)]], np.int32)
    for layer in range(place.layout.num_layers):
        raw = np.random.default_rng(layer).normal(size=(2, 1, tokens, side.shape.heads, 128)).astype(np.float32)
        key, value = jnp.asarray(raw, "bfloat16")
        pool, _ = sharding.write(
            pool, place, jnp.int32(layer), jnp.asarray(blocks), jnp.asarray(states), {"key": key, "value": value}
        )
    return pool


def by_plan(move: Move, pool: jax.Array) -> jax.Array:
    return execute(move.plan, move.have, move.source, pool, move.target)


def by_arrays(move: Move, pool: jax.Array) -> jax.Array:
    table = np.array([move.plan.source.row], np.int32)
    span = move.plan.target.shape.virtual_states(move.target.layout)
    numbers = np.arange(table.size * move.plan.source.shape.virtual_states(move.source.layout))
    row = np.array([*move.plan.target.row, *[-1] * len(numbers)])
    blocks = np.where(numbers < move.tokens, row[numbers // span], -1)[None].astype(np.int32)
    states = (numbers % span)[None].astype(np.int32)
    heads = P(None, None, "tensor") if move.plan.target.shape.head_replicas == 1 else P()
    for layer in range(move.target.layout.num_layers):
        found, _ = sharding.gather(move.have, move.source, jnp.int32(layer), jnp.asarray(table), assemble="context")
        merged = merge_heads(found, move.source.shape.head_replicas)
        there = jax.device_put(merged, NamedSharding(move.target.mesh, heads))
        pool, _ = sharding.write(pool, move.target, jnp.int32(layer), jnp.asarray(blocks), jnp.asarray(states), there)
    return pool


@functools.partial(jax.jit, static_argnums=1)
def merge_heads(found: dict[str, jax.Array], replicas: int) -> dict[str, jax.Array]:
    """`[data, tensor, states, heads, ...]` as `[data, states, every head, ...]`, each where it is."""

    def merge(content: jax.Array) -> jax.Array:
        once = jnp.moveaxis(content[:, ::replicas], 1, 2)
        return once.reshape(*once.shape[:2], -1, *once.shape[4:])

    return jax.tree.map(merge, found)


def by_host(move: Move, pool: jax.Array) -> jax.Array:
    pools = [np.array(array).view(np.uint8) for array in (move.have, pool)]
    for moves, origin in ((move.plan.sends, pools[0]), (move.plan.forwards, pools[1])):
        for one in moves:
            read, written = origin[0][one.source], pools[1][0][one.target]
            for layer in move.plan.layers:
                for run in move.plan.byte_runs(one, layer):
                    written[run.target : run.target + run.count] = read[run.source : run.source + run.count]
    return jax.device_put(pools[1].view(np.uint32), move.target.sharding)


WAYS: dict[str, Callable[[Move, jax.Array], jax.Array]] = {"plan": by_plan, "arrays": by_arrays}


def measure(move: Move, repeats: int) -> dict[str, float]:
    """Least seconds of each way, after one run that compiles and is checked."""
    expected = np.asarray(by_host(move, move.empty()))
    for name, way in WAYS.items():
        if not np.array_equal(np.asarray(way(move, move.empty())), expected):
            raise SystemExit(f"{name} and the plan's byte runs leave different bytes")
    seconds = dict.fromkeys(WAYS, float("inf"))
    for _ in range(repeats):
        for name, way in WAYS.items():
            pool = jax.block_until_ready(move.empty())
            start = time.perf_counter()
            jax.block_until_ready(way(move, pool))
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the request")
    parser.add_argument("--layers", type=int, default=8, help="layers, each of 128 elements a head")
    parser.add_argument("--repeats", type=int, default=7, help="timings of which the least counts")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {options.tokens} tokens, {options.layers} layers")
    print(
        f"{'':40} {'sent':>9} {'forwarded':>9} {'moves':>6} planning ms"
        + "".join(f"{name + ' ms':>11}" for name in WAYS)
    )
    for name, shapes in PAIRS.items():
        move = make(shapes, options.tokens, options.layers)
        seconds = measure(move, options.repeats)
        sizes = f"{move.plan.sent_bytes / 2**20:6.1f}MiB {move.plan.forwarded_bytes / 2**20:6.1f}MiB"
        count = len(move.plan.sends) + len(move.plan.forwards)
        print(
            f"{name:40} {sizes} {count:6} {1e3 * move.planning:11.1f}"
            + "".join(f"{1e3 * value:11.1f}" for value in seconds.values())
        )


if __name__ == "__main__":
    main()

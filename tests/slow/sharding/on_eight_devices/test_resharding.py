"""Plans carried out on devices: what arrives, bit for bit, and under which tags; and what is not copied."""

# jitted functions and lowered text are typed more loosely than the calls here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.errors import ConfigError, LayoutError
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.resharding import Side, plan_resharding
from hkv.mesh.sharding import ShardedLayout, make_mesh
from hkv.mesh.transfer import MoveUnit, _unpack, execute
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention
from reference.resharding import fill, holdings
from tests.cache.build import large_copies
from tests.resharding.cases import TAG, Case, content, side
from tests.test_documents import MESH, run_page

HEADS = FullAttention(block_size=4, num_kv_heads=4, head_size=4, head_size_v=2)
PAIR = dataclasses.replace(HEADS, num_kv_heads=2)
SCALES = dataclasses.replace(PAIR, head_size_v=4, quantization="int8_per_token_head")
PLANES = dataclasses.replace(HEADS, head_size_v=4, quantization="kv_planes")
LATENT = MLAAttention(block_size=4, head_size=8)
INDEXER = MLAAttention(block_size=4, head_size=128, dtype="uint8", quantization="fp8_indexer")
STATE = Mamba(block_size=4, shapes=((2,), (4,)), dtypes=("float32", "bfloat16"))


def shape(heads: int, tensor: int = 1, context: int = 1, interleave: int | None = 1, data: int = 1) -> ParallelShape:
    return ParallelShape(heads=heads, tensor=tensor, context=context, interleave=interleave, data=data)


def case(
    spec: LayerSpec, source: ParallelShape, target: ParallelShape, positions: range, orders: str = "LBNHC LBHNC"
) -> Case:
    here, there = orders.split()
    return Case(side(spec, source, here, [3, 1, 4, 2, 5], 4), side(spec, target, there, [5, 2, 1], 8), positions)


CASES = {
    "4 prefill ranks, 2 decode ranks": case(HEADS, shape(4, 4), shape(4, 2), range(16)),
    "2 prefill ranks, 4 decode ranks, from a hit on": case(HEADS, shape(4, 2), shape(4, 4), range(5, 16)),
    "heads replicated on both sides": case(PAIR, shape(2, 4), shape(2, 4), range(20)),
    "tensor to context": case(PAIR, shape(2, 2), shape(2, 1, 2), range(18), "BLNHC LHBNC"),
    "context 4 by pairs to tensor 2, context 2": case(PAIR, shape(2, 1, 4, 2), shape(2, 2, 2, 1), range(23)),
    "a latent everywhere": case(LATENT, shape(1, 2, 2, 1), shape(1, 4), range(17), "BLHNC BHLNC"),
    "scales beside": case(SCALES, shape(2, 2), shape(2, 1, 2, 4), range(12)),
    "all heads in one slot": case(PLANES, shape(4, 4), shape(4, 2), range(12), "LBHNC LBHNC"),
    "keys and scales in planes": case(INDEXER, shape(1, 1, 2, 2), shape(1, 2), range(10)),
    "heads outside on both sides": case(HEADS, shape(4, 2), shape(4), range(15), "LBHNC LHBNC"),
    "kernel blocks of 2 and 4 tokens": Case(
        side(PAIR, shape(2, 1, 2, 2), "LBHNC", [3, 1, 4], 4, kernel=2),
        side(PAIR, shape(2, 2, 2, 8), "LBNHC", [5, 2], 8, kernel=4),
        range(1, 20),
    ),
    "a state": case(STATE, shape(2, 2, 2, None), shape(2, 2, 1, None), range(1, 3)),
    "three ranks to two": case(
        dataclasses.replace(HEADS, num_kv_heads=6), shape(6, 3), shape(6, 2), range(16), "LBNHC BLNHC"
    ),
}


def sharded(chosen: Side, devices: list) -> ShardedLayout:
    return ShardedLayout(make_mesh(chosen.shape, devices), chosen.shape, chosen.layout)


def apart(chosen: Case) -> tuple[ShardedLayout, ShardedLayout]:
    """Each side on devices of its own where eight are enough."""
    counts = [one.shape.data * len(one.shape.ranks) for one in (chosen.source, chosen.target)]
    last = jax.devices()[-counts[1] :]
    return sharded(chosen.source, jax.devices()[: counts[0]]), sharded(chosen.target, last)


def random_pools(where: ShardedLayout, seed: int) -> np.ndarray:
    size = -(-where.layout.end // 16) * 16
    return np.random.default_rng(seed).integers(0, 256, (*where.mesh.devices.shape, size), np.uint8)


def by_rank(pools: np.ndarray, data: int = 0) -> dict[tuple[int, int], np.ndarray]:
    return {rank: pools[data][rank] for rank in np.ndindex(pools.shape[1:3])}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        *((name, "forward") for name in CASES),
        ("heads replicated on both sides", "direct"),
        ("a latent everywhere", "direct"),
    ],
)
def test_the_target_holds_what_a_cold_one_would(name: str, replicas: str) -> None:
    chosen = CASES[name]
    source, target = apart(chosen)
    have, cold = random_pools(source, 1), random_pools(target, 2)
    layers = range(chosen.source.layout.num_layers)
    fill(by_rank(have), holdings(chosen.source, *chosen.states, layers), content)
    pool = jax.device_put(cold, target.sharding)
    fill(by_rank(cold), holdings(chosen.target, *chosen.states, layers), content)
    plan = plan_resharding(chosen.source, chosen.target, chosen.positions, replicas=replicas)
    pool = execute(plan, jax.device_put(have, source.sharding), source, pool, target)
    assert np.asarray(pool).tobytes() == cold.tobytes()


def test_one_layer_of_one_replica_in_words() -> None:
    """Replica 1 of the source to replica 0 of the target, layer 1 alone, 32-bit words, meshes that share devices."""
    chosen = case(dataclasses.replace(HEADS, head_size_v=4), shape(4, 2, 2, 2, data=2), shape(4, 4, data=2), range(14))
    source, target = sharded(chosen.source, jax.devices()), sharded(chosen.target, jax.devices()[::-1])
    have, cold = random_pools(source, 1), random_pools(target, 2)
    layers = range(1, 2)
    fill(by_rank(have, 1), holdings(chosen.source, *chosen.states, layers), content)
    pool = jax.device_put(cold.view(np.uint32), target.sharding)
    fill(by_rank(cold, 0), holdings(chosen.target, *chosen.states, layers), content)
    plan = plan_resharding(chosen.source, chosen.target, chosen.positions, layers=layers)
    sent = jax.device_put(have.view(np.uint32), source.sharding)
    pool = execute(plan, sent, source, pool, target, source_data=1, target_data=0)
    assert np.asarray(pool).tobytes() == cold.tobytes()


def test_shadow_tags_say_where_every_slot_came_from() -> None:
    """Slots carry prefix, position, layer, head and the rank that computed them; other requests' another prefix."""
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=TAG.size, head_size_v=0, dtype="uint8")
    chosen = case(spec, shape(2, 4, 2, 2), shape(2, 2, 2, 4), range(3, 20))
    source, target = apart(chosen)
    layers = range(2)
    have, before = random_pools(source, 1), random_pools(target, 2)

    def tagged(prefix: int):
        return lambda part, layer, head, state, rank, nbytes: TAG.pack(prefix, state, layer, head, *rank)

    fill(by_rank(have), holdings(dataclasses.replace(chosen.source, row=(2, 5)), 0, 8, layers), tagged(8))
    fill(by_rank(have), holdings(chosen.source, 0, 20, layers), tagged(7))
    plan = plan_resharding(chosen.source, chosen.target, chosen.positions)
    pool = execute(plan, jax.device_put(have, source.sharding), source, jax.device_put(before, target.sharding), target)
    after = by_rank(np.asarray(pool))
    senders = {
        (m.target, h, r.state + i): m.source
        for m in plan.sends
        for h in m.heads
        for r in m.runs
        for i in range(r.count)
    }
    seen = 0
    for (_, layer, head, state), ranks in holdings(chosen.target, *chosen.states, layers).items():
        for rank, (start, nbytes) in ranks.items():
            tag = TAG.unpack(after[rank][start : start + nbytes].tobytes())
            assert tag == (7, state, layer, head, *senders[rank, head, state])
            seen += 1
    assert seen == 17 * 2 * 2


def test_requests_of_other_lengths_and_blocks_share_an_executable() -> None:
    chosen = CASES["4 prefill ranks, 2 decode ranks"]
    source, target = apart(chosen)
    pool = jax.device_put(random_pools(target, 2), target.sharding)
    have = jax.device_put(random_pools(source, 1), source.sharding)
    pool = execute(plan_resharding(chosen.source, chosen.target, range(16)), have, source, pool, target)
    before = _unpack._cache_size()
    moved = dataclasses.replace(chosen.target, row=(1, 3, 4)), dataclasses.replace(chosen.source, row=(5, 4, 3, 2, 1))
    pool = execute(plan_resharding(moved[1], moved[0], range(16)), have, source, pool, target)
    assert _unpack._cache_size() == before


def test_the_examples_of_the_documentation_run() -> None:
    arrived: Any = run_page("serving", since=MESH)["arrived"]
    state = arrived.view(jnp.bfloat16)
    assert state.shape[:3] == (1, 8, 1)
    assert float(jnp.sum(state)) == 2 * 2 * 4 * 2 * 16  # of three tokens two are moved, to two ranks a head, K and V


def test_the_pool_is_changed_in_place() -> None:
    spec = FullAttention(block_size=16, num_kv_heads=2, head_size=16)
    wide = shape(2, 2, 2)
    layout = dataclasses.replace(side(spec, wide, "LBNHC", [1], 16).layout, num_blocks=6)
    where = ShardedLayout(make_mesh(wide), wide, layout)
    words = 1 << 16
    pool = where.zeros(words)
    table = np.zeros((1, 2, 2, 2, 4, 5), np.int32)
    packets = [[np.zeros((1, 2, 2, 4, 16), np.uint32)]] * 2
    text = _unpack.lower(pool, where, table, packets, MoveUnit(1, 1, False), None).compile().as_text()
    assert "input_output_alias={ {}: (0, {}" in text
    assert [line for line in large_copies(text, words) if " scatter(" not in line] == []


def test_what_the_plan_was_not_made_for_is_refused() -> None:
    chosen = CASES["4 prefill ranks, 2 decode ranks"]
    source, target = apart(chosen)
    plan = plan_resharding(chosen.source, chosen.target, range(4))
    have = jax.device_put(random_pools(source, 1), source.sharding)
    pool = jax.device_put(random_pools(target, 2), target.sharding)
    with pytest.raises(ConfigError, match=r"source\.shape = "):
        execute(plan, have, target, pool, target)
    with pytest.raises(ConfigError, match="target_data = 1: expected a replica from 0 to 0"):
        execute(plan, have, source, pool, target, target_data=1)
    other = ShardedLayout(target.mesh, target.shape, dataclasses.replace(target.layout, offset=16))
    with pytest.raises(LayoutError, match=r"target\.layout = "):
        execute(plan, have, source, pool, other)
    with pytest.raises(LayoutError, match="target_pool = dtype"):
        execute(plan, have, source, pool.view(np.uint32), target)

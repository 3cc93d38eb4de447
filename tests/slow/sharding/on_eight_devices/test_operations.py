"""Sharded write, copy, zero and gather against the loops over one device's pool, bit for bit, padding included."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import reference.paged.operations as reference
from hkv.layout.block_layout import Order
from hkv.layout.views.numpy import numpy_dtype
from hkv.mesh import sharding
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.sharding import ShardedLayout, make_mesh
from tests.pallas_kernels.cases import DEPRECATED
from tests.slow.sharding.cases import BLOCKS, Case, latent, make_case

TOKENS = 6


@functools.partial(jax.jit, static_argnames=("sharded", "apart"), donate_argnames="pool")
def everything(pool, sharded, apart, layer, slots, values, copies, zeroed, table):
    """All operations in one executable, inside a caller's own `jit`."""
    pool, written = sharding.write(pool, sharded, layer, *slots, values)
    pool, copied = sharding.copy_blocks(pool, sharded, *copies)
    pool, cleared = sharding.zero_blocks(pool, sharded, zeroed)
    found, missing = sharding.gather(pool, sharded, layer, table)
    parts, _ = sharding.gather(pool, sharded, layer, table, assemble="local") if apart else ({}, None)
    return pool, found, parts, (written, copied, cleared, missing)


def arguments(case: Case, seed: int):
    """Mostly slots and ids that exist, different for each replica, and some that do not."""
    generator = np.random.default_rng(seed)
    data, states = case.shape.data, case.shape.virtual_states(case.layout)
    slots = np.stack([generator.permutation(BLOCKS * states)[:TOKENS] for _ in range(data)])
    blocks, inner = np.int32(slots // states), np.int32(slots % states)
    blocks[:, 1], blocks[:, 2], inner[:, 3], inner[:, 4] = -1, BLOCKS, states, -1
    order = np.stack([generator.permutation(BLOCKS) for _ in range(data)]).astype(np.int32)
    copies = np.concatenate([order[:, :2], [[-1, 9]] * data], 1), np.concatenate([order[:, 1:3], [[4, 0]] * data], 1)
    zeroed = np.concatenate([order[:, 3:4], [[BLOCKS, -1]] * data], 1)
    table = np.concatenate([order[:, 4:], [[-1, BLOCKS]] * data, order[:, :2], np.zeros((data, 1), int)], 1)
    return (blocks, inner), tuple(map(np.int32, copies)), np.int32(zeroed), np.int32(table)


def check(case: Case, seed: int, apart: bool = False) -> None:
    sharded = ShardedLayout(make_mesh(case.shape), case.shape, case.layout)
    whole, pools = case.random_pools(seed)
    slots, copies, zeroed, table = arguments(case, seed)
    values = case.random_values(TOKENS, seed)
    pool = jax.device_put(pools, sharded.sharding)
    layer = seed % case.layout.num_layers
    moved = (slots, values, copies, zeroed, table)
    pool, found, parts, counts = everything(pool, sharded, apart, np.int32(layer), *moved)
    found, parts = jax.tree.map(np.asarray, (found, parts))  # indexed by JAX, a sharded NaN is quieted on its way
    dtypes = {part.name: numpy_dtype(part.dtype) for part in case.layout.content}
    for data, one in enumerate(whole):
        own = {name: content[data] for name, content in values.items()}
        of_data = [array[data].tolist() for array in (*slots, *copies, zeroed, table)]
        expected = (
            reference.write(one, case.whole, layer, *of_data[:2], own),
            reference.copy_blocks(one, case.whole, *of_data[2:4]),
            reference.zero_blocks(one, case.whole, of_data[4]),
        )
        states, missing = reference.gather(one, case.whole, layer, table[data].tolist(), dtypes)
        assert tuple(int(count[data]) for count in counts) == (*expected, missing)
        for name, content in states.items():
            assert found[name][data].tobytes() == content.tobytes()
    case.spread(whole, pools)
    assert np.asarray(pool).tobytes() == pools.tobytes()
    assert bool(parts) == apart
    for (data, tensor, context), one in ((at, pools[at]) for at in np.ndindex(pools.shape[:3]) if apart):
        own, _ = reference.gather(one, case.layout, layer, table[data].tolist(), dtypes)
        for name, content in own.items():
            assert parts[name][data, tensor, context].tobytes() == content.tobytes()


SHAPES = {
    "1 device": ParallelShape(heads=2),
    "tensor 4": ParallelShape(heads=4, tensor=4),
    "tensor 8": ParallelShape(heads=8, tensor=8),
    "tensor 8 of 2 heads": ParallelShape(heads=2, tensor=8),
    "context 4": ParallelShape(heads=1, context=4, interleave=2),
    "context 8": ParallelShape(heads=2, context=8, interleave=4),
    "tensor 2, context 4": ParallelShape(heads=4, tensor=2, context=4, interleave=2),
    "tensor 4 of 2 heads, context 2": ParallelShape(heads=2, tensor=4, context=2),
    "data 2, tensor 2, context 2": ParallelShape(heads=2, data=2, tensor=2, context=2),
    "data 4, context 2, tokens replicated": ParallelShape(heads=1, data=4, context=2, interleave=None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    check(make_case(SHAPES[name]), seed=1, apart=True)


MIXED = ParallelShape(heads=4, tensor=2, context=4, interleave=2)


@pytest.mark.parametrize("order", [order.value for order in Order if order is not Order.LBNHC])
def test_orders(order: str) -> None:
    check(make_case(MIXED, order), seed=2)


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
def test_kernel_blocks(order: str) -> None:
    """An interleave of 4 tokens over kernel blocks of 2: what one rank is dealt lies in two of them."""
    shape = ParallelShape(heads=2, tensor=2, context=4, interleave=4)
    check(make_case(shape, order, block_size=8, kernel=2), seed=3)


@pytest.mark.parametrize("packing", ["int8_per_token_head", "nvfp4", "kv_planes"])
def test_packings(packing: str) -> None:
    """Scales in cells, planes of a page, and all heads in one slot; several and single heads a rank."""
    order = "LBHNC" if packing == "nvfp4" else "LBNHC"
    check(make_case(ParallelShape(heads=4, tensor=2, context=2), order, packing=packing, layers=1), seed=4)
    if packing == "kv_planes":
        check(make_case(ParallelShape(heads=2, tensor=4, context=2), order, packing=packing, layers=1), seed=5)


@pytest.mark.parametrize("packing", ["fp8_ds_mla", "fp8_indexer"])
def test_latents(packing: str) -> None:
    check(latent(ParallelShape(heads=1, tensor=2, context=4, interleave=2), packing), seed=6)


@pytest.mark.filterwarnings(DEPRECATED)
def test_a_kernel_under_the_mesh() -> None:
    """The same bytes by a Pallas kernel, interpreted, as by XLA."""
    case = make_case(ParallelShape(heads=2, tensor=2, context=2), layers=1)
    sharded = ShardedLayout(make_mesh(case.shape), case.shape, case.layout)
    pools, values = case.random_pools(7)[1], case.random_values(TOKENS, 7)
    slots, _, _, table = arguments(case, 7)
    results = []
    for implementation in (None, "pallas_triton:interpret"):
        pool = jax.device_put(pools, sharded.sharding)
        pool, _ = sharding.write(pool, sharded, np.int32(0), *slots, values, implementation)
        found, _ = sharding.gather(pool, sharded, np.int32(0), table, implementation=implementation)
        results.append([np.asarray(array).tobytes() for array in (pool, *found.values())])
    assert results[0] == results[1]

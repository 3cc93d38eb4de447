"""Limits of the compiled operations: they copy no pool, talk to no other rank unasked, and refuse what does not fit."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.block_tables import slots
from hkv.errors import ConfigError, LayoutError
from hkv.layout.block_layout import Layout
from hkv.mesh import sharding
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.sharding import ShardedLayout, make_mesh
from hkv.spec import FullAttention
from tests.cache.build import large_copies
from tests.slow.sharding.cases import make_case

SHAPE = ParallelShape(heads=4, tensor=2, context=4, interleave=4)
BLOCKS = 256
COLLECTIVES = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def large(order: str) -> ShardedLayout:
    spec = FullAttention(block_size=16, num_kv_heads=2, head_size=8)
    layout = Layout.of_spec(spec, order, num_blocks=BLOCKS, num_layers=2)
    return ShardedLayout(make_mesh(SHAPE), SHAPE, layout)


def copies(text: str, words: int) -> list[str]:
    """Instructions that make a pool anew; a scatter into the donated one does not."""
    return [line for line in large_copies(text, words) if " scatter(" not in line]


def values(tokens: int) -> dict[str, jax.Array]:
    return {name: jnp.ones((1, tokens, 4, 8), jnp.bfloat16) for name in ("key", "value")}


IDS = np.int32([[1, 2]])
OPERATIONS = {
    "write": lambda pool, where: sharding.write.lower(pool, where, np.int32(0), IDS, IDS, values(2)),
    "copy_blocks": lambda pool, where: sharding.copy_blocks.lower(pool, where, IDS, IDS + 1),
    "zero_blocks": lambda pool, where: sharding.zero_blocks.lower(pool, where, IDS),
}


@pytest.mark.parametrize("order", ["LBNHC", "BHLNC"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_donated_pool_is_changed_in_place_and_by_each_rank_alone(operation: str, order: str) -> None:
    where = large(order)
    words = where.layout.end // 4
    text = OPERATIONS[operation](where.zeros(words), where).compile().as_text()
    assert "input_output_alias={ {0}: (0, {}" in text
    assert copies(text, words) == []
    assert re.findall(COLLECTIVES, text) == []


def test_the_search_finds_a_copy_and_a_collective() -> None:
    where = large("LBNHC")
    pool = where.zeros(where.layout.end // 4)
    undonated = jax.jit(lambda pool: sharding.zero_blocks.__wrapped__(pool, where, IDS))
    assert copies(undonated.lower(pool).compile().as_text(), pool.shape[-1])
    summed = jax.jit(lambda pool: jnp.sum(pool, dtype=np.uint32)).lower(pool).compile().as_text()
    assert re.findall(COLLECTIVES, summed)


@pytest.mark.parametrize(("assemble", "collectives"), [("local", 0), ("context", 1), ("all", 2)])
def test_gather_talks_only_as_much_as_it_is_asked_to(assemble: str, collectives: int) -> None:
    where = large("LBNHC")
    pool = where.zeros(where.layout.end // 4)
    text = sharding.gather.lower(pool, where, np.int32(0), IDS, ("key",), assemble=assemble).compile().as_text()
    assert re.findall(COLLECTIVES, text) == ["all-gather"] * collectives
    assert copies(text, pool.shape[-1]) == []


def test_slots_are_those_of_each_rank() -> None:
    """The state of a virtual block is on the rank, and at the offset, that the slot mapping of that rank says."""
    for interleave in (1, 2, 4):
        shape = ParallelShape(heads=1, context=4, interleave=interleave)
        position = np.arange(3 * 16, dtype=np.int32)
        rank, state = shape.split(position % 16, interleave)
        table, rows = np.int32([[7, 3, 5]]), np.zeros_like(position)
        for context in range(4):
            geometry = slots.slot_geometry(4, ranks=4, rank=context, interleave=interleave)
            mapping, _ = slots.slot_mapping(geometry, table, np.int32([3]), np.int32(8), rows, position)
            mine = rank == context
            np.testing.assert_array_equal(mapping.blocks, np.where(mine, table[0][position // 16], -1))
            np.testing.assert_array_equal(mapping.offsets, np.where(mine, state, -1))


def test_what_does_not_fit_is_refused_by_name() -> None:
    where = large("LBNHC")
    with pytest.raises(ConfigError, match=r"mesh = .*'tensor': 2.*expected .*'tensor': 4"):
        ShardedLayout(where.mesh, ParallelShape(heads=4, tensor=4, context=2), where.layout)
    with pytest.raises(LayoutError, match="layout = 'key of 2 heads': expected 4 heads"):
        ShardedLayout(where.mesh, ParallelShape(heads=8, tensor=2, context=4), where.layout)
    with pytest.raises(ConfigError, match="devices = 7: expected 8"):
        make_mesh(SHAPE, jax.devices()[:7])
    with pytest.raises(LayoutError, match="words = 3: expected at least"):
        where.zeros(3)
    pool = where.zeros(where.layout.end // 4)
    with pytest.raises(LayoutError, match=r"values\['key'\] = 'bfloat16\[1, 1, 2, 8\]': expected 4 heads along axis 2"):
        sharding.write(pool, where, np.int32(0), IDS, IDS, {"key": jnp.ones((1, 1, 2, 8), jnp.bfloat16)})
    with pytest.raises(ConfigError, match="assemble = 'some': expected one of local, context, all"):
        sharding.gather(pool, where, np.int32(0), IDS, assemble="some")


def test_one_executable_serves_all_layers_ids_and_values() -> None:
    case = make_case(ParallelShape(heads=2, tensor=2, context=2))
    where = ShardedLayout(make_mesh(case.shape), case.shape, case.layout)
    pool = jax.device_put(case.random_pools(0)[1], where.sharding)
    before = sharding.zero_blocks._cache_size()
    for block in range(3):
        pool, _ = sharding.zero_blocks(pool, where, np.int32([[block, -1]]))
    assert sharding.zero_blocks._cache_size() == before + 1

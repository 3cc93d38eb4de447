"""A cache inside `jit` on a mesh: whole steps on replicated tables write sharded pages, with nobody on the host.

Checkpoints served on eight devices say what they say on one: heads shared out, or copied where there are fewer.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hkv.cache import step as serving
from hkv.cache.state import StepBatch
from hkv.keys.fingerprint import ROOT
from hkv.layout.block_layout import Layout
from hkv.mesh import sharding
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.sharding import ShardedLayout, make_mesh
from hkv.spec import FullAttention
from tests.cache.build import large_copies
from tests.reference.build import config as build
from tests.slow.examples import served_checkpoints

ROWS, STEPS, BLOCKS, ELEMENTS = 4, 40, 512, 8
SHAPE = ParallelShape(heads=2, tensor=2, context=4, interleave=2)
SPEC = FullAttention(block_size=4, num_kv_heads=1, head_size=ELEMENTS, dtype="float32")
CONFIG = build("full:16", num_blocks=BLOCKS, max_model_len=64)  # a virtual block: 4 ranks of 4 tokens


def content(row: jax.Array, position: jax.Array) -> jax.Array:
    """The key of a token, `[..., heads, elements]`: no two alike."""
    token = (row * 1000 + position).astype(jnp.float32)[..., None, None]
    return token * 100 + jnp.arange(2, dtype=jnp.float32)[:, None] * 10 + jnp.arange(ELEMENTS, dtype=jnp.float32)


def serve(parameters, state, pool, where, counts):
    """`STEPS` steps of one token a row in one executable; row r sits out where `counts` says so."""

    def one(carry, count):
        state, pool, position = carry
        zeros, rows = jnp.zeros(ROWS, jnp.int32), jnp.arange(ROWS)
        batch = StepBatch(position % 7, jnp.arange(ROWS + 1), jnp.where(count > 0, rows, -1), zeros, zeros)
        state, result = serving.step(parameters, state, batch, room=ROWS)
        key = content(jnp.arange(ROWS), position)[None]
        slots = result.blocks, result.offsets
        pool, dropped = sharding.write(pool, where, jnp.int32(0), *slots, {"key": key, "value": -key})
        return (state, pool, position + count), (result.status, dropped)

    (state, pool, lengths), seen = jax.lax.scan(one, (state, pool, jnp.zeros(ROWS, jnp.int32)), counts)
    return state, pool, lengths, seen


def test_steps_on_a_mesh() -> None:
    where = ShardedLayout(make_mesh(SHAPE), SHAPE, Layout.of_spec(SPEC, "LHBNC", num_blocks=BLOCKS))
    everywhere = NamedSharding(where.mesh, P())
    parameters, state = serving.init(CONFIG, rows=ROWS, row=32)
    state, _ = serving.start(state, np.arange(ROWS, dtype=np.int32), np.tile(np.uint32(ROOT), (ROWS, 1)))
    parameters, state = jax.device_put((parameters, jax.device_get(state)), everywhere)
    counts = (np.arange(STEPS)[:, None] % (np.arange(ROWS) + 2) != 1).astype(np.int32)
    words = where.layout.end // 4
    run = jax.jit(functools.partial(serve, where=where), donate_argnums=(1, 2))
    compiled = run.lower(parameters, state, where.zeros(words), counts=counts).compile()
    state, pool, lengths, (status, dropped) = compiled(parameters, state, where.zeros(words), counts=counts)
    assert not np.asarray(status).any()
    assert not np.asarray(dropped).any()
    np.testing.assert_array_equal(lengths, counts.sum(0))
    for row in range(ROWS):
        length = int(lengths[row])
        table = np.asarray(state.rows)[row, 0, : -(-length // 16)]
        assert len(set(table.tolist())) == len(table) > 1
        found, _ = sharding.gather(pool, where, np.int32(0), table[None])
        expected = np.asarray(content(jnp.int32(row), jnp.arange(length)))
        np.testing.assert_array_equal(np.asarray(found["key"])[0, :length], expected)
        np.testing.assert_array_equal(np.asarray(found["value"])[0, :length], -expected)
    text = compiled.as_text()
    assert [line for line in large_copies(text, words) if " scatter(" not in line] == []
    assert "callback" not in text
    assert not any(name in text for name in ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute("))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_the_same_is_said(family):
    """Two key heads of windows and sinks on eight devices, and latents, which every device keeps whole."""
    made = served_checkpoints.engine(family, rows=3, budget=13, devices=8)
    requests = served_checkpoints.served(made, family, (0, 1, 2, 3, 1, 0))
    assert requests[-1].hits[0] > 24
    assert len(made.served.pool.sharding.device_set) == len(jax.devices()) == 8
    assert {len(shard.data) for shard in made.served.pool.addressable_shards} == {len(made.served.pool) // 8}

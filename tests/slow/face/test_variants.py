"""Core pure functions give the same with and without `jit`, and from arrays on the host or on a device."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

import hkv
from hkv.cache import arrivals
from hkv.cache import step as whole
from hkv.cache.arrivals import Arrivals
from hkv.cache.state import StepBatch
from hkv.cache.token_hashing import hash_tokens
from hkv.keys import fingerprint
from reference.keys import fingerprint as plain

ROWS, WIDTH = 2, 8


def made() -> hkv.Cache:
    specs = [hkv.FullAttention(block_size=4), hkv.SlidingWindow(block_size=4, window=6)]
    config = hkv.cache_config(hkv.Topology.of_specs(specs), 24, max_model_len=32)
    return hkv.init(config, rows=ROWS, row_blocks=WIDTH)


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_keys(self) -> None:
        tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
        found = self.variant(fingerprint.keys)(tokens, np.array(fingerprint.ROOT, np.uint32))
        want = plain.keys(tokens)
        chex.assert_shape(found, (4, 4))
        chex.assert_type(found, jnp.uint32)
        chex.assert_trees_all_equal(found, want)

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_hashing_by_tokens_is_hashing_by_blocks(self) -> None:
        tokens = np.arange(10, dtype=np.int32)
        tails, none = np.zeros((1, 12), np.uint32), np.zeros(1, np.int32)
        tails[0, :4] = fingerprint.ROOT

        def hashed(*arguments):
            return hash_tokens(*map(jnp.asarray, arguments))

        found = self.variant(hashed)(np.int32(4), tails, none, none, np.array([10], np.int32), tokens)
        chex.assert_trees_all_equal(np.asarray(found.keys)[[0, 4]], plain.keys(tokens[:8].reshape(2, 4)))
        assert np.asarray(found.filled).tolist() == [place in (0, 4) for place in range(10)]

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_a_step_keeps_the_states_tree(self) -> None:
        cache = made()
        cache, _ = hkv.arrive(cache, jnp.array([0]), jnp.arange(8)[None], jnp.array([8]))
        ends, rows, none = np.array([0, 8, 8], np.int32), np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
        batch = StepBatch(np.arange(8, dtype=np.int32), ends, rows, none, none)

        def step(parameters, state, batch):
            return whole.step(parameters, state, batch, room=16)

        after, result = self.variant(step)(cache.parameters, cache.state, batch)
        chex.assert_trees_all_equal_structs(after, cache.state)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, cache.state)
        chex.assert_shape([result.blocks, result.offsets], (2, 8))
        chex.assert_trees_all_equal(result.status, np.zeros(2, np.int32))
        want = whole.step(cache.parameters, cache.state, batch, room=16)
        chex.assert_trees_all_equal((after, result), want)

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_arriving(self) -> None:
        cache = made()
        cache, _ = hkv.allocate(cache, 0, jnp.arange(9))
        coming = Arrivals(
            np.array([1], np.int32),
            np.array([fingerprint.ROOT], np.uint32),
            np.arange(9, dtype=np.int32)[None],
            np.array([9], np.int32),
        )
        after, found = self.variant(arrivals.arrive)(cache.parameters, cache.state, coming)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, cache.state)
        chex.assert_trees_all_equal(found.hits, np.array([8], np.int32))
        chex.assert_trees_all_equal(found.hits[0], hkv.longest_hit(cache, jnp.arange(9)).length)


def test_the_face_is_traced_once_for_each_shape() -> None:
    cache = made()
    counted = jax.jit(chex.assert_max_traces(lambda cache, row, tokens: hkv.allocate(cache, row, tokens), n=1))
    for row in range(ROWS):
        cache, given = counted(cache, row, jnp.arange(9) + 20 * row)
        assert given.status == 0
    assert cache.running.all()

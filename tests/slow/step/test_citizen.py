"""The serving cache under JAX's own checks and modes, and without compilation. Most checks speak while a program is
traced, which is quick.
"""

from __future__ import annotations

import time

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import hkv

R, PLACES = 3, 6


def made() -> hkv.Cache:
    """A cache of several kinds, so that every rule of a step has something to do."""
    specs = [hkv.FullAttention(block_size=4), hkv.SlidingWindow(block_size=4, window=6), hkv.Mamba(block_size=4)]
    return hkv.init(hkv.cache_config(hkv.Topology.of_specs(specs), 30, max_model_len=32), rows=R, row_blocks=8)


def arguments() -> dict[str, tuple[jax.Array, ...]]:
    """Arguments of each function, after the cache; integers of JAX's default width."""
    tokens, ends = jnp.arange(PLACES), jnp.array([0, 1, 2, PLACES])
    return {
        "arrive": (jnp.array([0, 2]), jnp.ones((2, 8), jnp.int32), jnp.array([7, 8])),
        "step": (tokens, ends, jnp.array([2, 1, 0]), jnp.array([0, 0, 1]), jnp.zeros(R, jnp.int32)),
        "finish": (jnp.array([1, -1]),),
        "longest_hit": (jnp.arange(9),),
        "allocate": (jnp.array(1), tokens),
    }


FUNCTIONS = ("arrive", "step", "finish", "longest_hit", "allocate")


def traced(name: str):
    """The program of a function, traced anew under the settings of now."""
    function = getattr(hkv, name)
    return jax.jit(lambda cache, *rest: function(cache, *rest)).trace(made(), *arguments()[name])


MODES = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
    "nans": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("mode", MODES)
def test_programs_can_be_traced_under_every_check(mode):
    with MODES[mode]():
        for name in FUNCTIONS:
            traced(name)


def test_programs_are_the_same_with_64_bit_integers():
    """No array of the cache or of an answer gets wider, so that a loop can carry it; and nothing warns."""
    for name in FUNCTIONS:
        narrow = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), traced(name).out_info)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), traced(name).out_info)
        assert wide == narrow, name


@pytest.mark.parametrize(
    ("name", "axes"), [*((name, AxisType.Auto) for name in FUNCTIONS), ("step", AxisType.Explicit)]
)
def test_a_program_inside_shard_map_says_what_varies(name, axes):
    """A cache for each device of an axis: `check_vma` is on by default."""
    mesh = jax.make_mesh((1,), ("replica",), axis_types=(axes,))
    cache = jax.tree.map(lambda leaf: leaf[None], made())
    rest = arguments()[name]

    def inside(cache: hkv.Cache, *rest: jax.Array):
        found = getattr(hkv, name)(jax.tree.map(lambda leaf: leaf[0], cache), *rest)
        return jax.tree.map(lambda leaf: leaf[None], found)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(inside, mesh=mesh, in_specs=(P("replica"), *[P()] * len(rest)), out_specs=P("replica"))
        where = jax.NamedSharding(mesh, P("replica"))
        jax.jit(mapped).trace(jax.device_put(cache, where), *jax.device_put(rest, jax.NamedSharding(mesh, P())))


def test_no_array_of_floats_is_made():
    """Arrays without floats have no NaN for `debug_nans` to find."""
    for name in FUNCTIONS:
        assert "f32[" not in str(traced(name).jaxpr)
        assert "f64[" not in str(traced(name).jaxpr)


def test_nothing_moves_between_host_and_device():
    cache, calls = made(), arguments()
    with jax.transfer_guard("disallow"):
        cache, _ = hkv.arrive(cache, *calls["arrive"])
        cache, result = hkv.step(cache, *calls["step"])
        cache, _ = hkv.finish(cache, *calls["finish"])
    assert result.status.tolist() == [0, 6, 0]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_are_exported_for_other_platforms(platform):
    exported = jax.export.export(
        jax.jit(lambda cache, *rest: jax.tree.leaves(hkv.step(cache, *rest))), platforms=[platform]
    )
    assert exported(made(), *arguments()["step"]).platforms == (platform,)


def test_steps_run_without_compilation():
    """No loop is over tokens or rows: what is left is some two thousand operations."""
    calls = arguments()
    compiled = hkv.step(hkv.arrive(made(), *calls["arrive"])[0], *calls["step"])
    with jax.disable_jit():
        seconds = []
        for _ in range(2):
            cache, _ = hkv.arrive(made(), *calls["arrive"])
            begun = time.process_time()
            found = hkv.step(cache, *calls["step"])
            seconds.append(time.process_time() - begun)
    jax.tree.map(np.testing.assert_array_equal, found, compiled)
    assert seconds[1] < 4


def test_the_face_is_traced_once_for_each_shape():
    cache = made()
    counted = jax.jit(chex.assert_max_traces(lambda cache, row, tokens: hkv.allocate(cache, row, tokens), n=1))
    for row in range(R):
        cache, given = counted(cache, row, jnp.arange(9) + 20 * row)
        assert given.status == 0
    assert cache.running.all()

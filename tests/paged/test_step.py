"""The decode write against the loops: groups in one pool and in several, kernels, quantisation, slots that are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import hkv
import reference.paged.operations as reference
from hkv import paged
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.paged.step import write_step
from hkv.spec import FullAttention, MLAAttention
from reference.paged.quantization import quantize_per_tensor, quantize_per_token_head
from tests.pallas_kernels import cases, programs

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

TOKENS = 4


def full(order, **changes):
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
    return Layout.of_spec(spec, order, num_blocks=5, num_layers=3, **changes)


WINDOW = Layout.of_spec(MLAAttention(block_size=2, head_size=20), "LBNHC", num_blocks=6, num_layers=2, offset=4096)
TOGETHER = ((full("LBNHC"), WINDOW), (0, 0))
"""A group of three layers and one of two, of other pages, behind it in the same pool."""

APART = ((full("LHBNC"), full("BLNHC")), (0, 1))


def sizes_of(layouts, pool_of):
    ends = list(zip(layouts, pool_of, strict=True))
    return [max(layout.end for layout, at in ends if at == pool) + 64 for pool in sorted(set(pool_of))]


def lists(arrays):
    return [array.tolist() for array in arrays]


@st.composite
def slots(draw, layout):
    """Slots of a step, none twice, padding and ids that do not exist among them."""
    count = layout.num_blocks * layout.states_per_block
    places = draw(st.permutations(range(count)))[:TOKENS]
    blocks = [place // layout.states_per_block for place in places]
    choices = st.sampled_from([None, None, -1, -2, layout.num_blocks, 2**31 - 1])
    wrong = draw(st.lists(choices, min_size=TOKENS, max_size=TOKENS))
    return np.int32([b if w is None else w for b, w in zip(blocks, wrong, strict=True)]), np.int32(
        [place % layout.states_per_block for place in places]
    )


def values_of(layout, seed):
    found = {}
    for part, shape in programs.values_of(layout, layout.num_layers * TOKENS).items():
        raw = cases.random_words((layout.num_layers, TOKENS, *shape.shape[1:]), shape.dtype, seed)
        found[part] = raw
        seed += 1
    return found


@pytest.mark.parametrize("implementation", ["xla", cases.runnable("pallas_triton")])
@pytest.mark.parametrize("groups", [TOGETHER, APART], ids=["in one pool", "in two pools"])
def test_write_step(groups, implementation):
    check_write_step(groups, implementation)


def check_write_step(groups, implementation):
    layouts, pool_of = groups

    @given(st.tuples(*map(slots, layouts)), st.integers(0, 2**32 - 1))
    @settings(max_examples=10)
    def check(drawn, seed):
        blocks, states = zip(*drawn, strict=True)
        values = tuple(values_of(layout, seed + 10 * group) for group, layout in enumerate(layouts))
        expected = [cases.random_words((size,), np.uint8, seed + 5) for size in sizes_of(layouts, pool_of)]
        pools = tuple(pool.copy() for pool in expected)
        got, dropped = paged.write_step(
            pools, layouts, blocks, states, values, pool_of=pool_of, implementation=implementation
        )
        assert int(dropped) == reference.write_step(expected, layouts, lists(blocks), lists(states), values, pool_of)
        assert [cases.bits(pool) for pool in got] == [cases.bits(pool) for pool in expected]

    check()


def check_in_one_pool():
    """Check by which defects are judged (`tests/mutants`)."""
    check_write_step(TOGETHER, "xla")


@pytest.mark.parametrize("implementation", ["xla", cases.runnable("pallas_triton")])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_values_are_quantised_on_their_way(dtype, implementation):
    check_quantised(dtype, implementation)


def check_quantised(dtype, implementation):
    """Quantised values against their twin, halves of an integer among them."""
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype=dtype)
    layout = Layout.of_spec(spec, "LBNHC", num_blocks=5, num_layers=3)
    blocks, states = np.int32([1, 4, 2, 0]), np.int32([0, 3, 1, 1])
    wide = {
        part: np.random.default_rng(seed).integers(-40, 40, (3, TOKENS, 2, 8)).astype(ml_dtypes.bfloat16) * 3.25
        for seed, part in enumerate(("key", "value"))
    }
    scales = {"key": np.float32([0.5, 2, 3]), "value": np.float32(0.25)}
    quantised = {
        part: np.stack(
            [
                quantize_per_tensor(layer, scale, dtype_of(dtype))
                for layer, scale in zip(content, np.broadcast_to(scales[part], 3), strict=True)
            ]
        )
        for part, content in wide.items()
    }
    expected = [cases.random_words((layout.end,), np.uint8, 3)]
    pools = (expected[0].copy(),)
    got, _ = paged.write_step(pools, (layout,), (blocks,), (states,), (wide,), (scales,), None, implementation)
    reference.write_step(expected, [layout], lists([blocks]), lists([states]), [quantised], [0])
    assert cases.bits(got[0]) == cases.bits(expected[0])


@pytest.mark.parametrize("implementation", ["xla", cases.runnable("pallas_triton")])
def test_a_batch_of_pools_is_quantised_as_each_is(implementation):
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="int8")
    layout = Layout.of_spec(spec, "LBNHC", num_blocks=5)
    wide = np.random.default_rng(1).normal(size=(2, 2, 1, TOKENS, 2, 8)).astype(np.float32) * 40
    pools = np.stack([cases.random_words((layout.end,), np.uint8, seed) for seed in range(2)])
    blocks, states = np.int32([1, 4, 2, -1]), np.int32([0, 3, 1, 1])

    def write(pool, key, value, scale):
        given, scales = {"key": key, "value": value}, {"key": scale, "value": np.float32(0.25)}
        found, _ = paged.write_step((pool,), (layout,), (blocks,), (states,), (given,), (scales,), None, implementation)
        return found[0]

    each = (pools, wide[0], wide[1], np.float32([0.5, 2]))
    together = jax.vmap(write)(*each)
    assert [cases.bits(pool) for pool in together] == [cases.bits(write(*some)) for some in zip(*each, strict=True)]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("layers", [1, 8])
def test_launches_do_not_depend_on_layers(layers):
    spec = FullAttention(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    layout = Layout.of_spec(spec, "LBNHC", num_blocks=8, num_layers=layers)
    values = {
        part: jax.ShapeDtypeStruct((layers, TOKENS, *shape.shape[1:]), shape.dtype)
        for part, shape in programs.values_of(layout, TOKENS).items()
    }
    pool, ids = jax.ShapeDtypeStruct((layout.end,), np.uint8), jax.ShapeDtypeStruct((TOKENS,), np.int32)

    def step(pool, ids, values):
        return paged.write_step((pool,), (layout,), (ids,), (ids,), (values,), implementation="pallas_triton")

    text = programs.lowered(programs.Program(step, (pool, ids, values), (0,), layout.end)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


def test_groups_that_do_not_agree_are_refused():
    pool, ids = np.zeros(WINDOW.end, np.uint8), np.int32([1])
    with pytest.raises(LayoutError, match="pool_of"):
        paged.write_step((pool,), (WINDOW,), (ids,), (ids,), ({},), pool_of=(1,))
    with pytest.raises(LayoutError, match="values"):
        paged.write_step((pool,), (WINDOW,), (ids,), (ids,), ())
    with pytest.raises(LayoutError, match=r"values\['latent'\]"):
        paged.write_step((pool,), (WINDOW,), (ids,), (ids,), ({"latent": np.zeros((1, 1, 1, 20), np.float32)},))


# Values that an explicit mesh axis splits are refused, with a word on what to do; whole ones are written.


SPEC = hkv.FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
LAYOUT = hkv.Layout.of_spec(SPEC, "LBHNC", num_blocks=8)


def test_values_that_are_split_by_heads_are_refused():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.ones((3, 2, 8)), jax.NamedSharding(mesh, P(None, "heads")))
        ids, pool = jnp.arange(3), jnp.zeros(LAYOUT.end // 4, jnp.uint32)
        with pytest.raises(LayoutError, match=r"values\['key'\] = .*split as.*jax.reshard.*hkv.mesh"):
            hkv.write(pool, LAYOUT, 0, ids, ids, {"key": split, "value": split})
        with pytest.raises(LayoutError, match=r"values\['key'\] = .*split as"):
            write_step((pool,), (LAYOUT,), (ids,), (ids,), ({"key": split[None], "value": split[None]},))
        whole = jax.reshard(split, P())
        _, missed = hkv.write(pool, LAYOUT, 0, ids, ids, {"key": whole, "value": whole})
        assert missed == 0


# Quantisation on the way into pages.


DTYPES = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
SCALES = [0.25, 1.0, 3.0, 1e-3]


def drawn(seed, spread):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(4, 3, 8)) * 10.0 ** generator.uniform(-spread, spread, (4, 3, 1))
    values[generator.random((4, 3)) < 0.2] = 0
    return values.astype(ml_dtypes.bfloat16)


@given(st.sampled_from(DTYPES), st.sampled_from(SCALES), st.integers(0, 2**32 - 1))
def test_per_tensor(dtype, scale, seed):
    values = drawn(seed, 3)
    got = np.asarray(paged.quantize_per_tensor(values, np.float32(scale), dtype.name))
    assert got.dtype == dtype
    assert got.tobytes() == quantize_per_tensor(values, scale, dtype).tobytes()


@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_per_token_and_head(dtype, seed):
    values = drawn(seed, 3)
    got, scales = paged.quantize_per_token_head(values, dtype.name)
    expected, wanted = quantize_per_token_head(values, dtype)
    assert np.asarray(scales).tobytes() == wanted.tobytes()
    assert np.asarray(got).tobytes() == expected.tobytes()


def test_a_dtype_that_is_not_quantised_to_is_named():
    with pytest.raises(LayoutError, match="dtype = 'int4'"):
        paged.quantize_per_tensor(np.ones(3, np.float32), np.float32(1), "int4")

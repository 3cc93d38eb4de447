"""`vmap` and `shard_map` of every implementation, and pools of any dtype and rank, against single calls in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hkv import paged
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.spec import FullAttention
from tests.pallas_kernels import cases

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

OLD_JAX = jax.__version_info__ < (0, 11)
LAYOUT = Layout.of_spec(
    FullAttention(block_size=2, num_kv_heads=2, head_size=32, dtype="float32"), "LBNHC", num_blocks=5, num_layers=2
)
BATCH = 3
BLOCKS = np.int32([[1, 2, -1, 9], [0, 1, 2, 3], [4, 3, 2, 1]])
STATES = np.int32([0, 1, 1, 0])
TABLES = np.int32([[1, 2], [0, -1], [4, 9]])
KERNELS = ("xla", cases.runnable("pallas_triton"), cases.runnable("mosaic"))


def pools():
    return cases.random_words((BATCH, LAYOUT.end // 4), np.uint32, 0)


def tokens():
    return {name: cases.random_words((BATCH, 4, 2, 32), np.float32, n) for n, name in enumerate(("key", "value"))}


def written(code):
    return lambda pool, blocks, values: paged.write(pool, LAYOUT, np.int32(1), blocks, STATES, values, code)[0]


def gathered(code):
    return lambda pool, table: paged.gather(pool, LAYOUT, np.int32(0), table, implementation=code)[0]


def copied(code):
    def function(pool, blocks):
        return paged.copy_blocks(pool, LAYOUT, blocks[:2], blocks[2:], code, disjoint=True)[0]

    return function


def one_by_one(function, *arguments):
    return [function(*(jax.tree.map(lambda a, b=b: a[b], argument) for argument in arguments)) for b in range(BATCH)]


def check(found, expected):
    found = jax.tree.map(np.asarray, found)
    for batch in range(BATCH):
        mine = jax.tree.map(lambda a, b=batch: cases.bits(a[b]), found)
        assert mine == jax.tree.map(cases.bits, expected[batch])


def skip_if_in_place(code):
    if OLD_JAX and code.startswith("mosaic"):
        pytest.skip("JAX 0.10 cannot interpret a Mosaic GPU kernel that writes through a reference (KeyError: None)")


@pytest.mark.parametrize("code", KERNELS)
def test_vmap_of_a_write(code):
    skip_if_in_place(code)
    check(jax.vmap(written(code))(pools(), BLOCKS, tokens()), one_by_one(written("xla"), pools(), BLOCKS, tokens()))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("code", KERNELS)
def test_vmap_of_a_write_into_copies_of_one_pool(code):
    skip_if_in_place(code)
    pool, values = pools()[0], jax.tree.map(lambda a: a[0], tokens())
    found = jax.vmap(lambda blocks: written(code)(pool, blocks, values))(BLOCKS)
    check(found, [written("xla")(pools()[0], blocks, values) for blocks in BLOCKS])


@pytest.mark.parametrize("code", KERNELS)
def test_vmap_of_a_gather(code):
    check(jax.vmap(gathered(code))(pools(), TABLES), one_by_one(gathered("xla"), pools(), TABLES))
    if code.startswith("mosaic"):
        return  # its interpreter takes a second a batch
    twice = jax.vmap(jax.vmap(gathered(code), in_axes=(None, 0)), in_axes=(0, None))(pools(), TABLES)
    for batch in range(BATCH):
        mine = jax.tree.map(lambda a, b=batch: np.asarray(a)[b], twice)
        check(mine, [gathered("xla")(pools()[batch], table) for table in TABLES])


@pytest.mark.parametrize("code", KERNELS)
def test_vmap_of_copies_within_a_pool(code):
    skip_if_in_place(code)
    blocks = np.int32([[1, 2, 3, 0], [0, 1, 2, 9], [-1, 3, 2, 1]])
    check(jax.vmap(copied(code))(pools(), blocks), one_by_one(copied("xla"), pools(), blocks))


@pytest.mark.parametrize("code", ["xla", cases.runnable("pallas_triton")])
def test_shard_map(code):
    mesh = jax.make_mesh((1,), ("ranks",), axis_types=(AxisType.Auto,))

    def local(pool, blocks, values):
        return written(code)(pool[0], blocks[0], jax.tree.map(lambda a: a[0], values))[None]

    # JAX asks kernels how their results vary over the mesh; `check_vma=False` is what it has for those that do not say.
    specs = (P("ranks"), P("ranks"), P("ranks"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ranks"), check_vma=code == "xla")
    first = jax.tree.map(lambda a: a[:1], (pools(), BLOCKS, tokens()))
    found = jax.jit(mapped)(*first)
    assert cases.bits(np.asarray(found)[0]) == cases.bits(one_by_one(written("xla"), pools(), BLOCKS, tokens())[0])


@pytest.mark.parametrize("split", ["pool", "query"])
def test_attention_in_shard_map(split):
    """The pool alone varies over the mesh, or the query and a score of no value alone."""
    mesh = jax.make_mesh((1,), ("ranks",), axis_types=(AxisType.Auto,))
    pool = np.zeros((1, LAYOUT.end // 4), np.uint32)
    query, sinks = np.ones((1, 3, 2, 32), np.float32), np.zeros((1, 2), np.float32)
    table, starts, lengths = np.int32([[1, 2]]), np.int32([0, 3]), np.int32([4])

    def local(pool, query, sinks):
        return paged.attention(pool[0], LAYOUT, 1, query[0], table, starts, lengths, sinks=sinks[0])[None]

    specs = (P("ranks"), P(), P()) if split == "pool" else (P(), P("ranks"), P("ranks"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ranks"))
    assert not np.asarray(jax.jit(mapped)(pool, query, sinks)).any()


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32]
)
def test_a_pool_of_any_dtype_and_rank(dtype):
    """An engine's array as it is: `[layers, blocks, states, heads, elements]`."""
    raw = cases.random_words((LAYOUT.end,), np.uint8, 5)
    pool = raw.view(dtype).reshape(2, 5, 2, 2, -1)
    values = jax.tree.map(lambda a: a[0], tokens())
    got = written(None)(pool.copy(), BLOCKS[0], values)
    assert (got.dtype, got.shape) == (pool.dtype, (2, 5, 2, 2, got.shape[-1]))
    assert cases.bits(got) == cases.bits(written(None)(raw.copy(), BLOCKS[0], values))
    found = gathered(None)(pool, TABLES[0])
    expected = gathered(None)(raw, TABLES[0])
    assert {name: cases.bits(a) for name, a in found.items()} == {name: cases.bits(a) for name, a in expected.items()}


@pytest.mark.parametrize("dtype", [np.complex64, bool, ml_dtypes.int4])
def test_elements_that_are_no_whole_bytes_or_too_wide_are_refused(dtype):
    with pytest.raises(LayoutError, match="buffer"):
        gathered(None)(jnp.zeros((2, 100_000), dtype), TABLES[0])

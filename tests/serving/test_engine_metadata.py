"""Metadata for JAX's kernels, which read with it what HKV attends to, under the names of the engines' fields."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

import hkv
from hkv import serving
from hkv.cache.state import StepResult
from hkv.errors import LayoutError
from hkv.layout.views.numpy import numpy_dtype
from hkv.model.topology import Group
from tests.cache.build import large_copies

HEADS, SIZE, BLOCK, BLOCKS, WIDTH, WINDOW = 2, 128, 4, 80, 5, 6
RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "data" / "engine_metadata.json").read_text())
COUNTS, LENGTHS = np.array([1, 1, 5, 3, 0]), np.array([17, 4, 9, 0, 0])
"""Tokens of each query: two decodes, a chunk, a query that is refused, and none; and tokens of each row with them."""


def served(dtype="float32", order="LBNHC", size=SIZE, **spec):
    """A cache of two layers of full attention, one of a window and one of states, whose pool holds random numbers."""
    shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": size, "dtype": dtype, **spec}
    full, window = hkv.FullAttention(**shape), hkv.SlidingWindow(**shape, window=WINDOW)
    state = hkv.Mamba(block_size=BLOCK, shapes=((5,),), dtypes=("float32",))
    named = ((full, ("first", "second")), (window, ("near",)), (state, ("state",)))
    groups = tuple(Group(tag=layers[0], spec=spec, layers=layers) for spec, layers in named)
    config = hkv.cache_config(hkv.Topology(groups=groups), BLOCKS, max_model_len=WIDTH * BLOCK)
    return filled(serving.from_config(config, rows=5, order=order), dtype)


def filled(made, dtype):
    numbers = np.random.default_rng(1).uniform(-1, 1, made.pool.nbytes // numpy_dtype(dtype).itemsize)
    return dataclasses.replace(made, pool=jax.device_put(numbers.astype(numpy_dtype(dtype)).view(np.uint32)))


def turn(groups=3):
    """A step in which one query was refused."""
    ok = (COUNTS > 0) & (LENGTHS > 0)
    tables = np.random.default_rng(2).permutation(np.arange(1, 1 + len(ok) * groups * WIDTH))
    tables = np.where(ok[:, None, None], tables.reshape(len(ok), groups, WIDTH), 0)
    none = jax.device_put(np.zeros(0, np.int32))
    blocks = {
        "reads": tables[:, :, 0].astype(np.int32),
        "writes": np.where(ok[:, None], tables[:, :, 1], -1).astype(np.int32),
    }
    result = StepResult(
        status=none, allowed=none, blocks=none, offsets=none, registered=none, deferred=none, **jax.device_put(blocks)
    )
    starts = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
    positions = np.full(12, -1)
    for start, count, length in zip(starts, COUNTS * ok, LENGTHS, strict=False):
        positions[start : start + count] = np.arange(length - count, length)
    arrays = (ok, positions.astype(np.int32), starts, LENGTHS.astype(np.int32), tables.astype(np.int32))
    return serving.Turn(result, *jax.device_put(arrays))


def read_by_jax(made, asked, layer, query, **settings):
    """The kernel's own reference, in one program: it loops in Python over queries, whose lengths are constants."""
    found = serving.ragged(made, asked, layer)
    starts, pages = found.cu_q_lens, found.page_indices.reshape(len(COUNTS), -1)
    count = found.num_seqs
    assert count.tolist() == [4]
    lengths, pages, starts, count = map(np.asarray, (found.kv_lens, pages, starts, count))

    def read(query, content):
        return kernel.ref_ragged_paged_attention(
            query, content, lengths, pages, starts, count, sm_scale=SIZE**-0.5, **settings
        )

    return jax.jit(read)(jnp.asarray(query), serving.kernel_pages(made, layer))


@pytest.mark.parametrize(
    ("layer", "dtype", "order"),
    [("near", "float32", "LBNHC"), ("second", "float32", "BLNHC"), ("second", "bfloat16", "LBNHC")],
)
def test_jaxs_kernel_reads_what_is_attended_to(layer, dtype, order):
    made, asked = served(dtype, order), turn()
    query = np.random.default_rng(3).uniform(-1, 1, (int(COUNTS.sum()), 2 * HEADS, SIZE)).astype(np.float32)
    settings = {"sliding_window": WINDOW} if layer == "near" else {}
    theirs = read_by_jax(made, asked, layer, query, **settings)
    mine = serving.attend(made, layer, asked, jnp.asarray(query))
    ok, near = np.repeat((LENGTHS > 0), COUNTS), 0.02 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(np.asarray(mine)[ok], np.asarray(theirs)[ok], rtol=near, atol=near)


def written(made, asked, layer):
    """New keys and values of all tokens, the cache with those that are no padding, and a step that says where."""
    draw, (part, _) = np.random.default_rng(4), made.layer(layer).layout.content
    shape, dtype = (12, HEADS, *part.shape), numpy_dtype(part.dtype)
    key, value = (jax.device_put(draw.uniform(-9, 9, shape).astype(dtype)) for _ in range(2))
    starts, positions, tables = map(np.asarray, (asked.cu_q_lens, asked.positions, asked.tables))
    query = np.minimum(np.searchsorted(starts, np.arange(12), side="right") - 1, len(COUNTS) - 1)
    column, offset = np.maximum(positions, 0) // BLOCK, positions % BLOCK
    blocks = np.where(positions >= 0, tables[query, made.layer(layer).group, column], -1)
    slots = {
        name: jax.device_put(np.stack([array] * 3).astype(np.int32))
        for name, array in (("blocks", blocks), ("offsets", offset))
    }
    asked = dataclasses.replace(asked, result=dataclasses.replace(asked.result, **slots))
    return key, value, serving.write(made, layer, asked, {"key": key, "value": value})


@pytest.mark.tokamax
@pytest.mark.parametrize("layer", ["first", "second", "near"])
def test_tokamax_writes_and_attends_as_hkv_does(layer):
    """Its reference, which writes the new tokens itself; a refused query's go to the null block."""
    from tokamax._src.ops.batched_rpa import api

    made, asked = served(), turn()
    key, value, wanted = written(served(), asked, layer)  # of its own, whose pool it takes
    query = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, (12, 2 * HEADS, SIZE)).astype(np.float32))
    found = serving.ragged(made, asked, layer)
    theirs, pages = api.batched_ragged_paged_attention(
        query,
        key,
        value,
        serving.kernel_pages(made, layer),
        found.kv_lens,
        found.page_indices,
        found.cu_q_lens,
        found.distribution,
        sm_scale=SIZE**-0.5,
        sliding_window=WINDOW if layer == "near" else None,
        implementation="reference",
    )
    mine = serving.attend(wanted, layer, asked, query)
    live = np.asarray(asked.positions) >= 0
    np.testing.assert_allclose(np.asarray(mine)[live], np.asarray(theirs)[live], rtol=1e-5, atol=1e-5)
    null = made.layer(layer).index * BLOCKS
    kept = np.arange(len(pages)) != null
    np.testing.assert_array_equal(np.asarray(pages)[kept], np.asarray(serving.kernel_pages(wanted, layer))[kept])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 72), ("float32", 128), ("bfloat16", 64), ("bfloat16", 256), ("float16", 96), ("float8_e4m3fn", 128)],
)
def test_pages_are_those_that_are_written(dtype, size):
    """A decode's token: the first of the page in which it is the seventeenth."""
    made, asked = served(dtype, size=size), turn()
    key, value, found = written(made, asked, "second")
    pages = serving.kernel_pages(found, "second")
    assert pages.dtype == numpy_dtype(dtype)
    page = np.asarray(pages)[BLOCKS + np.asarray(asked.tables)[0, 0, 16 // BLOCK], 0]
    key, value = np.asarray(key), np.asarray(value)
    np.testing.assert_array_equal(page, np.stack([key[0], value[0]], axis=1).reshape(2 * HEADS, size))


def test_latents_are_pages_too():
    spec = hkv.MLAAttention(block_size=BLOCK, head_size=24, dtype="bfloat16")
    groups = (Group(tag="latents", spec=spec, layers=("a", "b")),)
    config = hkv.cache_config(hkv.Topology(groups=groups), BLOCKS, max_model_len=WIDTH * BLOCK)
    made = filled(serving.from_config(config, rows=5), "bfloat16")
    asked = turn(groups=1)
    found = serving.kernel_pages(made, "b")
    assert (found.shape, found.dtype) == ((2 * BLOCKS, BLOCK, 24), jnp.bfloat16)
    index = np.asarray(serving.ragged(made, asked, "b").page_indices).reshape(5, WIDTH)[2]
    want, _ = hkv.gather(made.pool, made.layer("b").layout, 1, np.asarray(asked.tables)[2, 0])
    np.testing.assert_array_equal(np.asarray(found)[index].reshape(-1, 24), np.asarray(want["latent"])[:, 0])


def test_fields_are_those_of_tpu_inference():
    made, asked = served(), turn()
    found = serving.tpu_inference(made, asked, "near", "state")
    fields = RECORDED["tpu_inference"]["fields"]
    assert [name for name, field in fields.items() if "jax.Array" in field["type"]] == list(found)
    assert {array.dtype for array in found.values()} == {jnp.dtype("int32")}
    shapes = {name: array.shape for name, array in found.items()}
    assert shapes == {
        "input_positions": (12,),
        "block_tables": (5 * WIDTH,),
        "seq_lens": (5,),
        "query_start_loc": (6,),
        "request_distribution": (3,),
        "mamba_state_indices": (5,),
    }
    assert found["request_distribution"].tolist() == [2, 2, 4]
    assert found["seq_lens"].tolist() == [17, 4, 9, 3, 0]
    assert found["input_positions"].tolist() == [16, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert "mamba_state_indices" not in serving.tpu_inference(made, asked, "near")


def test_states_are_carried_to_where_they_are_read():
    made, asked = served(), turn()
    begun = dataclasses.replace(asked.result, reads=asked.result.reads.at[1].set(0))
    asked = dataclasses.replace(asked, result=begun)
    before = serving.read_state(made, "state", asked)["state0"]
    carried = serving.carry_states(made, "state", asked)
    slots = serving.tpu_inference(carried, asked, "first", "state")["mamba_state_indices"]
    layout = made.layer("state").layout
    found, _ = hkv.gather(carried.pool, layout, 0, slots)
    before = np.asarray(before)
    np.testing.assert_array_equal(np.asarray(found["state0"])[:3, 0], before[:3])
    assert not np.asarray(before[1]).any()
    assert np.asarray(before[0]).any()


def test_fields_are_those_of_sglang_jax():
    made, asked = served(), turn()
    found, table = serving.sglang_jax(made, asked, "second"), serving.ragged(made, asked, "second").page_indices
    assert list(RECORDED["sglang_jax"]["fields"]) == list(found)
    assert {array.dtype for array in found.values()} == {jnp.dtype("int32")}
    held = [5, 1, 3, 1, 0]
    assert found["cu_kv_lens"].tolist() == [0, *(BLOCK * np.cumsum(held)).tolist()]
    wanted = [page for row, count in zip(table.reshape(5, -1).tolist(), held, strict=True) for page in row[:count]]
    assert found["page_indices"].tolist() == wanted + [0] * (5 * WIDTH - sum(held))


def test_pages_are_no_copy():
    made, asked = served("bfloat16"), turn()

    def total(made, asked):
        found = serving.ragged(made, asked, "second")
        return made, serving.kernel_pages(made, "second")[found.page_indices].sum()

    text = jax.jit(total, donate_argnums=0).lower(made, asked).compile().as_text()
    assert large_copies(text, made.pool.size) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [({"order": "LBHNC"}, "an order of heads inside tokens"), ({"head_size_v": 64}, "keys and values of one size")],
)
def test_other_pages_are_refused(made, message):
    with pytest.raises(LayoutError, match=message):
        serving.kernel_pages(served(**made), "first")


def test_pages_apart_by_parts_of_a_page_are_refused():
    made = served()
    moved = dataclasses.replace(made.layer("first").layout, offset=64)
    made = dataclasses.replace(made, layers=(dataclasses.replace(made.layer("first"), layout=moved),))
    with pytest.raises(LayoutError, match=r"offset of layers\['first'\] = 64: expected a multiple of the page's"):
        serving.ragged(made, turn(), "first")

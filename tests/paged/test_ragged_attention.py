"""Attention over block tables against its definition, and against code that others wrote: JAX's ragged attention."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

import reference.paged.ragged_attention as reference
from hkv import paged
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.layout.views import numpy as numpy_views
from hkv.layout.views.numpy import numpy_dtype
from hkv.spec import FullAttention, Mamba, MLAAttention

BLOCKS, COLUMNS, ROWS, TOKENS = 13, 6, 3, 12


def attention(**changes):
    sizes = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "head_size_v": 4, "dtype": "float32"}
    return FullAttention(**{**sizes, **changes})


LAYOUTS = {
    **{order.value: Layout.of_spec(attention(), order, num_blocks=BLOCKS, num_layers=2) for order in Order},
    "float16, padded": Layout.of_spec(attention(dtype="float16", page_size_padded=512), "BLNHC", num_blocks=BLOCKS),
    "bfloat16, one state a block": Layout.of_spec(
        attention(dtype="bfloat16", block_size=1), "LBNHC", num_blocks=BLOCKS
    ),
    "int8 and scales": Layout.of_spec(
        quantize(attention(head_size_v=8), "int8_per_token_head"), "LBNHC", num_blocks=BLOCKS
    ),
    "float8": Layout.of_spec(quantize(attention(), "fp8_per_tensor"), "LBNHC", num_blocks=BLOCKS),
    "latents": Layout.of_spec(MLAAttention(block_size=4, head_size=12, dtype="float32"), "LBNHC", num_blocks=BLOCKS),
}


def filled(layout, seed, spoilt=()):
    """A pool of numbers from -2 to 2, NaN in the blocks that are spoilt where their dtype has one."""
    source = np.random.default_rng(seed)
    pool = np.zeros(layout.end, np.uint8)
    for layer in range(layout.num_layers):
        for part in layout.content:
            view = numpy_views.view(pool, layout.part_view(part.name, layer))
            whole = view.dtype == np.int8
            content = source.integers(-90, 90, view.shape) if whole else source.uniform(-2, 2, view.shape)
            view[...] = np.asarray(content * (0.01 if part.name.endswith("scale") else 1)).astype(view.dtype)
            if not whole:
                view[list(spoilt)] = np.nan
    return pool


@st.composite
def batches(draw, block, words):
    """Rows of queries at the end of their tokens, some without, and the arguments that `words` names."""
    lengths = [draw(st.integers(0, COLUMNS * block)) for _ in range(ROWS)]
    asked = []
    for length in lengths:
        asked.append(draw(st.integers(0, min(length, TOKENS - sum(asked)))))
    ids = draw(st.permutations(range(1, BLOCKS)))
    table = np.array([[ids[(row * 5 + column) % len(ids)] for column in range(COLUMNS)] for row in range(ROWS)])
    options = {
        "window": draw(st.integers(1, 12)),
        "chunk": draw(st.integers(1, 12)),
        "sink_tokens": draw(st.sampled_from((0, 1, 5))),
        "soft_cap": draw(st.sampled_from((0.5, 3.0))),
        "sinks": np.array(draw(st.tuples(*[st.floats(-2, 2)] * 4)), np.float32),
    }
    seed = draw(st.integers(0, 1 << 20))
    return lengths, np.cumsum([0, *asked]), table, {word: options[word] for word in words}, seed


EVERYTHING = ("window", "sink_tokens", "soft_cap", "sinks")


@pytest.mark.parametrize(
    ("name", "words"),
    [*((name, EVERYTHING) for name in LAYOUTS), *(("LBNHC", words) for words in ((), ("chunk", "sink_tokens")))],
)
@given(data=st.data())
@settings(max_examples=8)
def test_attends_as_defined(name, words, data):
    layout = LAYOUTS[name]
    lengths, starts, table, options, seed = data.draw(batches(layout.states_per_block, words))
    latent = name == "latents"
    query = np.random.default_rng(seed).uniform(-1, 1, (TOKENS, 4, 12 if latent else 8)).astype(np.float32)
    options |= {"value_size": 5 if latent else None, "scale": 0.4}
    layer, buffer = layout.num_layers - 1, contents(name)
    got = paged.attention(buffer, layout, layer, query, table, starts, np.array(lengths), **options)
    dtypes = {part.name: numpy_dtype(part.dtype) for part in layout.content}
    want = reference.attention(np.asarray(buffer), layout, layer, query, table, starts, lengths, dtypes, **options)
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-5, atol=2e-5)


@functools.cache
def contents(name):
    return filled(LAYOUTS[name], 11)


def paged_like_jax(dtype, mask_window, soft_cap, seed):
    """A pool of LBNHC pages, and the same bytes as the pages of JAX's ragged paged attention: `[N, H, K|V]`."""
    heads, size, block, blocks = 2, 128, 8, 9
    layout = Layout.of_spec(
        attention(block_size=block, num_kv_heads=heads, head_size=size, head_size_v=size, dtype=dtype),
        "LBNHC",
        num_blocks=blocks,
    )
    buffer = filled(layout, seed)
    pages = buffer.view(numpy_dtype(dtype)).reshape(blocks, block, 2 * heads, size)
    source = np.random.default_rng(seed)
    lengths, asked = np.array([37, 8, 21], np.int32), np.array([5, 1, 21])
    starts = np.cumsum([0, *asked]).astype(np.int32)
    table = source.permutation(np.arange(1, blocks))[np.arange(15).reshape(3, 5) % (blocks - 1)].astype(np.int32)
    query = source.uniform(-1, 1, (starts[-1], 4, size)).astype(np.float32)
    mine = paged.attention(
        buffer, layout, 0, query, table, starts, lengths, window=mask_window, scale=0.1, soft_cap=soft_cap
    )

    @jax.jit
    def attend(query, pages):
        rows = (lengths, table, starts, np.array([3], np.int32))
        return kernel.ref_ragged_paged_attention(
            query, pages, *rows, sm_scale=0.1, sliding_window=mask_window, soft_cap=soft_cap
        )

    theirs = attend(query, pages)
    return np.asarray(mine), np.asarray(theirs)


@pytest.mark.parametrize(("mask_window", "soft_cap"), [(None, None), (9, 2.0)])
def test_a_page_is_the_page_of_jaxs_ragged_paged_attention(mask_window, soft_cap):
    mine, theirs = paged_like_jax("float32", mask_window, soft_cap, 3)
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_page_of_bfloat16_is_too():
    mine, theirs = paged_like_jax("bfloat16", None, None, 4)
    np.testing.assert_allclose(mine, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("window", [5])
def test_it_is_jaxs_attention_of_the_same_keys(window):
    """`jax.nn.dot_product_attention` over what `gather` finds."""
    layout = LAYOUTS["LBHNC"]
    buffer = filled(layout, 7)
    length, asked = 19, 11
    table = np.array([[3, 9, 1, 7, 12]], np.int32)
    found, _ = paged.gather(buffer, layout, 1, table[0])
    keys, values = (np.asarray(found[name])[:length] for name in ("key", "value"))
    values = np.pad(values, ((0, 0), (0, 0), (0, 4)))  # JAX wants values of the keys' size
    query = np.random.default_rng(7).uniform(-1, 1, (length, 4, 8)).astype(np.float32)
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, local_window_size=window and (window - 1, 0)
    )
    want = np.asarray(jax.jit(attend)(query, keys, values))
    got = paged.attention(
        buffer, layout, 1, query[-asked:], table, np.array([0, asked]), np.array([length]), window=window
    )
    np.testing.assert_allclose(got, want[-asked:, :, :4], rtol=1e-5, atol=1e-5)


def test_what_no_query_sees_may_be_anything():
    """NaN in blocks before a window, after the end of a row, and in those of other rows."""
    layout = LAYOUTS["LBNHC"]
    table = np.array([[0, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], np.int32)
    starts, lengths = np.array([0, 2, 5]), np.array([18, 3])
    query = np.random.default_rng(1).uniform(-1, 1, (6, 4, 8)).astype(np.float32)

    def run(pool):
        return np.asarray(paged.attention(pool, layout, 0, query, table, starts, lengths, window=6))

    clean = run(filled(layout, 5))
    spoilt = run(filled(layout, 5, spoilt=[2, 6, 8, 9, 10, 11, 12]))
    np.testing.assert_array_equal(clean, spoilt)
    assert np.isfinite(clean).all()
    assert not clean[5].any()
    assert np.isnan(run(filled(layout, 5, spoilt=[4]))[:2]).all()


def test_only_columns_in_reach_are_walked():
    """A window's dead columns may name anything, and the walk is as long as the window, not as the context."""
    layout = LAYOUTS["LBNHC"]
    table, lengths = np.array([[99, 99, 99, 99, 5, 6]], np.int32), np.array([24])
    query = np.ones((1, 4, 8), np.float32)
    live = paged.attention(filled(layout, 5), layout, 0, query, table, np.array([0, 1]), lengths, window=8)
    table[0, :4] = 1
    again = paged.attention(filled(layout, 5), layout, 0, query, table, np.array([0, 1]), lengths, window=8)
    np.testing.assert_array_equal(live, again)


def test_bad_arguments_are_named():
    layout = LAYOUTS["LBNHC"]
    good = {
        "buffer": filled(layout, 1),
        "layout": layout,
        "layer": 0,
        "query": np.ones((2, 4, 8), np.float32),
        "table": np.ones((1, 2), np.int32),
        "cu_q_lens": np.array([0, 2]),
        "kv_lens": np.array([2]),
    }
    states = Layout.of_spec(Mamba(block_size=4, shapes=((3, 4),), dtypes=("float32",)), "LBNHC", num_blocks=3)
    packed = Layout.of_spec(quantize(attention(head_size_v=8), "int4_per_token_head"), "LBNHC", num_blocks=3)
    for name, value in (
        ("query", np.ones((2, 4, 7), np.float32)),
        ("query", np.ones((2, 3, 8), np.float32)),
        ("query", np.ones((2, 4, 8), np.int32)),
        ("table", np.ones((2,), np.int32)),
        ("cu_q_lens", np.array([0, 1, 2])),
        ("kv_lens", np.array([2, 2])),
        ("sinks", np.ones(3, np.float32)),
        ("value_size", 9),
        ("layout", states),
        ("layout", packed),
    ):
        with pytest.raises(LayoutError, match=name):
            paged.attention(**{**good, name: value})
    with pytest.raises(LayoutError, match="chunk"):
        paged.attention(**good, window=2, chunk=2)

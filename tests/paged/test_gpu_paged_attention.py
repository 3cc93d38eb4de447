"""JAX's paged attention for GPUs reads HKV's pages where they lie, and says what `hkv.paged.attention` says."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkv
from hkv.paged import attention
from tests.pallas_kernels.programs import Program, lowered

with warnings.catch_warnings():
    # JAX 0.11 deprecates its kernels for GPUs; this one is still the kernel that both versions have.
    warnings.filterwarnings("ignore", r"jax\.experimental\.pallas\.ops\.gpu\.paged_attention", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROWS, BLOCKS, HEADS, SHARED, SIZE = 3, 24, 2, 2, 32
FULL = hkv.FullAttention(block_size=16, num_kv_heads=HEADS, head_size=SIZE, dtype="float32")
LATENT = hkv.MLAAttention(block_size=16, head_size=2 * SIZE, dtype="float32")
SPLITS, PAGES = 4, 4
"""Parts into which the kernel splits a row, and pages that it reads together."""
LENGTHS = np.int32([5, 70, 33])


def tile(layout):
    """Bytes of one head's states of one block, of which the kernel's pages are an array."""
    return layout.shape[3] * layout.shape[4]


def readable(layout):
    """True if the states of one head of one block lie in one run, and such runs a whole number of runs apart."""
    strides = layout.strides[:3] if layout.shape[2] > 1 else layout.strides[:2]
    return layout.strides[3] == layout.shape[4] and all(stride % tile(layout) == 0 for stride in strides)


def by_kernel(layout, pool, layer, query, table, interpret):
    """Attention by the kernel, which takes arrays of keys and of values.

    Both are the pool: a cell is a key and its value side by side, so that the query is zero where the value lies, and
    of the sums only that half is used. Latents are key and value at once.
    """
    heads, states, cell = layout.shape[2], layout.shape[3], layout.shape[4] // 4
    pages = jax.lax.bitcast_convert_type(pool, jnp.float32).reshape(1, -1, states, cell)
    steps = [stride // tile(layout) for stride in layout.strides[:3]]
    first = layer * steps[0] + table[:, None] * steps[1] + (np.arange(heads) * steps[2])[:, None]
    first = jnp.pad(first.reshape(ROWS * heads, -1), ((0, 0), (0, -table.shape[1] % (SPLITS * PAGES))))
    query = query.reshape(ROWS * heads, -1, query.shape[-1]) * query.shape[-1] ** -0.5
    query = jnp.pad(query, ((0, 0), (0, 0), (0, cell - query.shape[-1])))
    sizes = {"k_splits": SPLITS, "pages_per_compute_block": PAGES, "interpret": interpret}
    found = paged_attention(query, pages, pages, first.astype(jnp.int32), jnp.repeat(LENGTHS, heads), **sizes)
    return found.reshape(ROWS, -1, cell)


def drawn(spec, order):
    """A pool of random numbers of two layers, and a table of blocks in no order."""
    layout = hkv.Layout.of_spec(spec, order, num_blocks=BLOCKS, num_layers=2)
    draw = np.random.default_rng(0)
    pool = draw.standard_normal(layout.end // 4).astype(np.float32).view(np.uint32)
    table = draw.permutation(np.arange(1, BLOCKS))[:15].reshape(ROWS, 5).astype(np.int32)
    query = draw.standard_normal((ROWS, HEADS * SHARED, spec.head_size)).astype(np.float32)
    return layout, pool, table, query


@pytest.mark.parametrize(("spec", "order"), [(FULL, "LBHNC"), (FULL, "BLHNC"), (LATENT, "BLNHC")])
def test_the_kernel_says_what_attention_says(spec, order):
    layout, pool, table, query = drawn(spec, order)
    assert readable(layout)
    wanted = attention(pool, layout, 1, query, table, np.arange(ROWS + 1, dtype=np.int32), LENGTHS)
    found = np.asarray(
        jax.jit(functools.partial(by_kernel, layout, layer=1, interpret=True))(pool, query=query, table=table)
    )
    np.testing.assert_allclose(found[..., -wanted.shape[-1] :], wanted, atol=2e-6)


def test_pages_with_heads_between_the_states_are_told_apart():
    assert not readable(drawn(FULL, "LBNHC")[0])


def test_it_lowers_for_a_gpu():
    layout, pool, table, query = drawn(FULL, "LBHNC")

    def run(pool, query, table):
        return by_kernel(layout, pool, 1, query, table, interpret=False)

    assert "paged_attention" in lowered(Program(run, (pool, query, table), (), 0)).as_text()

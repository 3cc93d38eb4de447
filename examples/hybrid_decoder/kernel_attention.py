"""One query a row, over the whole row, by JAX's paged-attention kernel for GPUs, where it can read the pages.

The kernel takes keys and values as two arrays of pages. Here both are the pool itself, whose cells are a key and its
value side by side: the query is zero where the value lies, and of the sums only that half is used. The latent cells of
MLA are key and value at once. So nothing is copied or moved.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.layout.block_layout import Layout

with warnings.catch_warnings():
    # JAX 0.11 deprecates its kernels for GPUs; this one is still the kernel that both versions have.
    warnings.filterwarnings("ignore", r"jax\.experimental\.pallas\.ops\.gpu\.paged_attention", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

SPLITS, PAGES = 4, 4
"""Parts into which the kernel splits a row, and pages that it reads together."""


def readable(layout: Layout) -> bool:
    """True if the states of one head of one block lie in one run, an equal number of runs apart, powers of two wide."""
    _, _, heads, states, content = layout.shape
    tile = states * content
    apart = all(stride % tile == 0 for stride in (*layout.strides[:2], layout.strides[2] if heads > 1 else tile))
    together = layout.strides[3] == content and layout.strides[4] == 1 and layout.split == 1 and layout.offset == 0
    words = content // 4
    return apart and together and words >= 16 and words & (words - 1) == 0 and states >= 1


def attend_by_kernel(
    layout: Layout,
    pool: jax.Array,
    layer: jax.Array,
    query: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Attention over all tokens of each row.

    Args:
      layout: of float32 cells, `readable`.
      pool: uint32[words]; no NaN in it.
      layer: int32[], which of the layout's layers.
      query: float32[R, heads, k], scaled; k the elements of a key, or of a whole cell.
      table: int32[R, W], the rows' blocks.
      lengths: int32[R], tokens of each row.
      interpret: whether to run where there is no GPU, slowly.

    Returns:
      float32[R, heads, cell]: the sums of whole cells.
    """
    _, _, heads, states, content = layout.shape
    tile, cell = states * content, content // 4
    rows = query.shape[0]
    pages = lax.bitcast_convert_type(pool, jnp.float32).reshape(1, -1, states, cell)
    steps = [stride // tile for stride in layout.strides[:3]]
    first = layer * steps[0] + table[:, None, :] * steps[1] + (np.arange(heads) * steps[2])[None, :, None]
    unit = SPLITS * PAGES
    first = jnp.pad(first.reshape(rows * heads, -1), ((0, 0), (0, -table.shape[1] % unit)))
    query = query.reshape(rows * heads, -1, query.shape[-1])
    query = jnp.pad(query, ((0, 0), (0, 0), (0, cell - query.shape[-1])))
    sizes = {"k_splits": SPLITS, "pages_per_compute_block": PAGES, "interpret": interpret}
    repeated = jnp.repeat(lengths.astype(jnp.int32), heads)
    found = paged_attention(query, pages, pages, first.astype(jnp.int32), repeated, **sizes)
    return found.reshape(rows, -1, cell)

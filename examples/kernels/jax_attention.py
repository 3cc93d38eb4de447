"""JAX's ragged paged attention under test: its plain form, which its TPU kernel is held to.

hkv check-kernel examples/kernels/jax_attention.py:ref_ragged_paged_attention --draws 100
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention as plain

from hkv.testing.kernels import kernel


@kernel("attention", dtypes=("float32", "bfloat16"), lacks=("window", "two sizes"), head_sizes=(8,), reuse=5)
def ref_ragged_paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    kernel_block_table: Array,
    cu_q_lens: Array,
    kv_lens: Array,
    scale: float,
) -> Array:
    """`ref_ragged_paged_attention`: heads of keys and of values take turns in a page."""
    pages = jnp.stack([key_cache, value_cache], axis=3)
    pages = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])
    rows = jnp.array([len(kv_lens)], jnp.int32)
    return plain(query, pages, kv_lens, kernel_block_table, cu_q_lens, rows, sm_scale=scale)

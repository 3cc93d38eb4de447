"""JAX's paged attention under test: the plain form of its TPU kernel, and its kernel for GPUs, interpreted.

    hkv check-kernel examples/kernels/jax_attention.py:ref_ragged_paged_attention
    hkv check-kernel examples/kernels/jax_attention.py:paged_attention
    hkv check-kernel examples/kernels/jax_attention.py:paged_attention --supports 'lacks=window,two sizes'

The last one fails: the kernel for GPUs multiplies what lies behind a request's last token by zero, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import paged_attention as for_gpus
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention as plain

from hkv.testing.kernels import kernel

SUPPORTS: dict[str, Any] = {"dtypes": ("float32", "bfloat16"), "head_sizes": (8,), "reuse": 20}


@kernel("attention", lacks=("window", "two sizes"), **SUPPORTS)
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


@kernel("attention", axes="HBND", lacks=("window", "two sizes", "NaN in free slots"), **SUPPORTS)
def paged_attention(
    query: Array, key_cache: Array, value_cache: Array, kernel_block_table: Array, kv_lens: Array, scale: float
) -> Array:
    """`paged_attention` of Pallas for GPUs, which takes one query of each request and scales none."""
    if len(query) > len(kv_lens):
        raise NotImplementedError("several queries of a request")
    scaled = query * jnp.asarray(scale, query.dtype)
    sizes = {"pages_per_compute_block": 1, "k_splits": 1, "interpret": True}
    return for_gpus.paged_attention(scaled, key_cache, value_cache, kernel_block_table, kv_lens, **sizes)

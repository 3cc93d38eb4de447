"""tokamax 0.0.17's batched ragged paged attention under test, which writes the new tokens itself: its plain JAX form.

    hkv check-kernel examples/kernels/tokamax_writer.py:write
    hkv check-kernel examples/kernels/tokamax_writer.py:attention

Pages are `[pages, slots, keys and values by heads in turn, 128 elements]`, which the bytes of an LBNHC page are.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from tokamax._src.ops.batched_rpa import api

from hkv.testing.kernels import kernel

SUPPORTS: dict[str, Any] = {
    "layouts": ("LBNHC", "LBHNC", "LHBNC", "B*C"), "dtypes": ("bfloat16", "float16", "float32"),
    "head_sizes": (128,), "reuse": 20,
}  # fmt: skip


@kernel("write", lacks=("two sizes", "tensor scales"), **SUPPORTS)
def write(key: Array, value: Array, kv_cache: Array, slot_mapping: Array, kernel_block_size: int) -> Array:
    """Each token is a request of its own, as long as its slot in its block says; those that are padding come last."""
    tokens, slots = len(key), slot_mapping.astype(jnp.int32)
    order = jnp.argsort(slots < 0)
    key, value, slots = key[order], value[order], slots[order]
    count = (slots >= 0).sum()
    pages = _called(
        jnp.zeros_like(key), key, value, kv_cache, jnp.maximum(slots, 0) % kernel_block_size + 1,
        jnp.maximum(slots, 0) // kernel_block_size, jnp.arange(tokens + 1, dtype=jnp.int32), count,
    )[1]  # fmt: skip
    return pages.reshape(kv_cache.shape)


@kernel("attention", lacks=("two sizes", "NaN in free slots"), **SUPPORTS)
def attention(
    query: Array,
    kv_cache: Array,
    kernel_block_table: Array,
    cu_q_lens: Array,
    kv_lens: Array,
    scale: float,
    window: int | None,
) -> Array:
    """Attention alone; slots behind a request's last token are multiplied by zero there."""
    none = jnp.zeros((len(query), kv_cache.shape[2], query.shape[-1]), query.dtype)
    given = kernel_block_table.reshape(-1), cu_q_lens, jnp.int32(len(kv_lens))
    return _called(query, none, none, kv_cache, kv_lens, *given, scale, sliding_window=window, skip_kv_update=True)[0]


def _called(
    query: Array, key: Array, value: Array, cache: Array, lengths: Array, table: Array, starts: Array, count: Array,
    scale: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    pages = cache.reshape(*cache.shape[:2], -1, key.shape[-1])
    return api.batched_ragged_paged_attention(
        query, key, value, pages, lengths, table, starts, jnp.stack([0 * count, 0 * count, count]).astype(jnp.int32),
        sm_scale=scale, implementation="reference", **options,
    )  # fmt: skip

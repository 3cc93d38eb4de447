"""Quantisation of keys and values on their way into pages: per tensor, or per token and head with stored scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import LayoutError
from hkv.layout.views.derivatives import without_derivative
from pallas_kernels.move.moves import LARGEST, saturated


def quantize_per_tensor(values: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """`values` times the reciprocal of `scale`, rounded to nearest even and saturated.

    Args:
      values: any float dtype, any shape.
      scale: float32 scalar; the cache does not hold it.
      dtype: one of `LARGEST`.

    Raises:
      LayoutError: values are not quantised to that dtype, or are differentiated and become integers.
    """
    return saturated(check_quantised(values, dtype).astype(jnp.float32) * (np.float32(1) / scale), dtype)


def quantize_per_token_head(values: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Values scaled so that the largest magnitude of each (token, head) is the largest the dtype holds.

    Args:
      values: any float dtype, `[tokens, heads, elements]`.
      dtype: one of `LARGEST`.

    Returns:
      The quantised values, and float32 `[tokens, heads]` such that `quantised * scale` is about `values`: the largest
      magnitude times the float32 reciprocal of the dtype's largest. A row of zeros has scale 1.

    Raises:
      LayoutError: as `quantize_per_tensor`.
    """
    wide = check_quantised(values, dtype).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    # Compilers turn a division by a constant into this multiplication; written out, every form does the same.
    scale = jnp.where(largest > 0, largest * np.float32(1 / LARGEST[dtype]), 1.0).astype(jnp.float32)
    return saturated(wide * (np.float32(1) / scale)[..., None], dtype), scale


def check_quantised(values: jax.Array, dtype: str) -> jax.Array:
    """Values that may become elements of `dtype`.

    Raises:
      LayoutError: values are not quantised to that dtype, or are differentiated and become integers.
    """
    if dtype not in LARGEST:
        raise LayoutError("dtype", dtype, f"one of {', '.join(LARGEST)}")
    return without_derivative("values", values) if dtype == "int8" else values

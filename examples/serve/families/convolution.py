"""The short causal convolution in front of a recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.serve.checkpoint import Weights
from examples.serve.layers import EXACT


def convolve(weights: Weights, past: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of a convolution of each channel, and silu.

    Args:
      weights: `conv1d`'s.
      past: the inputs before, `[kernel - 1, channels]`.
      new: this token's, `[channels]`.

    Returns:
      The inputs before the next token, and the output `[channels]`.
    """
    inputs = jnp.concatenate([past, new[None]])
    found = jnp.einsum("kc,ck->c", inputs, weights["conv1d.weight"][:, 0], precision=EXACT)
    return inputs[1:], jax.nn.silu(found + weights.get("conv1d.bias", 0))

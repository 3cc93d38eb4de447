"""Products and sums, in two ways: as XLA likes, or so that no bit depends on how many tokens are computed together.

XLA may take a sum in another order for another shape, and may or may not round a product before it adds it. In the
exact way neither shows. Factors are rounded to 8 bits, as bfloat16 inputs are, so that every product is a float32 and
rounding it changes nothing; and sums are trees whose shape depends only on the place of a term, never on how many zeros
follow. Sums are float32 either way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def contract(exact: bool, subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """`jnp.einsum` of two operands that sums over one axis, which no other operand repeats."""
    if not exact:
        return jnp.einsum(subscripts, left, right)
    inputs, output = subscripts.split("->")
    names = inputs.split(",")
    (summed,) = set("".join(names)) - set(output)
    factors = [_aligned(rounded(x), axes, output + summed) for x, axes in zip((left, right), names, strict=True)]
    return total(True, factors[0] * factors[1])


def total(exact: bool, x: jax.Array) -> jax.Array:
    """The sum over the last axis. Exactly: halves are added, the second to the first, until one term is left."""
    if not exact:
        return jnp.sum(x, axis=-1)
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def rounded(x: jax.Array, bits: int = 8) -> jax.Array:
    """`x` with a significand of `bits` bits, the leading one included."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits - 1)


def _aligned(x: jax.Array, axes: str, wanted: str) -> jax.Array:
    """`x` with its axes in the order of `wanted`, and axes of one element where it has none."""
    order = sorted(range(len(axes)), key=lambda axis: wanted.index(axes[axis]))
    x = jnp.transpose(x, order)
    shape = iter(x.shape)
    return x.reshape([next(shape) if name in axes else 1 for name in wanted])

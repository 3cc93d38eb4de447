"""Refusing derivatives where values become bits: JAX's own for a bitcast to an integer is 0, without a word."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from hkv.errors import LayoutError


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivative(argument: str, values: jax.Array) -> jax.Array:
    """The values themselves, which nothing may be differentiated through, forward or backward.

    Args:
      argument: name of the values, as the caller knows it.
      values: any dtype and shape.

    Raises:
      LayoutError: a derivative with respect to something that the values depend on was asked for.
    """
    del argument
    return values


@functools.partial(without_derivative.defjvp, symbolic_zeros=True)
def _refuse(argument: str, primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    (values,), (tangent,) = primals, tangents
    if not isinstance(tangent, SymbolicZero):
        given = f"{values.dtype}{list(values.shape)}, differentiated"
        expected = "no derivative, for they become bits and it would be 0: jax.lax.stop_gradient makes them constants"
        raise LayoutError(argument, given, expected)
    return values, tangent

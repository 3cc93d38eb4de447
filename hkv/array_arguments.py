"""Shapes and dtypes of arrays that users hand over, asserted by chex; what does not fit is HKV's own error.

Shapes and dtypes are known while a function is traced, so the checks cost nothing once it is compiled.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import HKVError, OperationError


def require_array(
    name: str, value: Any, shape: tuple[int | None, ...], kind: Any = int, error: type[HKVError] = OperationError
) -> jax.Array:
    """The value as an array.

    Args:
      name: as the caller knows it.
      value: the given value; a number for the shape ().
      shape: its shape, None for any length.
      kind: its dtype, or `int`, `float`, `bool` for any of those; integers become int32.
      error: class of the error that is raised.

    Raises:
      HKVError: another shape or dtype, or no array.
    """
    if isinstance(value, int | np.integer) and shape == ():
        value = np.asarray(value)
    try:
        if not isinstance(value, jax.Array | np.ndarray):
            raise AssertionError(f"{type(value).__name__} is no array")
        chex.assert_shape(value, shape)
        chex.assert_type(value, kind)
    except AssertionError:
        lengths = ", ".join("n" if length is None else str(length) for length in shape)
        expected = f"an array [{lengths}] of {getattr(kind, '__name__', kind)}"
        raise error(name, _described(value), expected) from None
    return jnp.asarray(value, jnp.int32) if kind is int else jnp.asarray(value)


def require_whole(name: str, value: jax.Array, error: type[HKVError] = OperationError) -> jax.Array:
    """The value, if no mesh axis of explicit type splits it: bits of one pool are not split by a value's axes.

    Args:
      name: as the caller knows it.
      value: any array.
      error: class of the error that is raised.

    Raises:
      HKVError: a value that is split, with how to make it whole or its pool as split as it is.
    """
    sharding: Any = getattr(jax.typeof(value), "sharding", None)
    spec = tuple(getattr(sharding, "spec", ()) or ())
    if any(axes is not None for axes in spec):
        expected = "a value that no axis splits: jax.reshard(value, jax.P()), or a pool a device (hkv.mesh.sharding)"
        raise error(name, f"{_described(value)} split as {sharding.spec}", expected)
    return value


def _described(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"

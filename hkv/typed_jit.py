"""`jax.jit` that keeps a function's types, and shapes and dtypes of arrays that users hand over, asserted by chex.

Shapes and dtypes are known while a function is traced, so the checks cost nothing once it is compiled.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import HKVError, OperationError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Protocol[P, R_co]):
    """A compiled function: called like the function itself."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Runs it, compiled for the shapes, dtypes and static values of its arguments."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for such arguments, not compiled yet."""
        ...


def typed_jit(
    *, static_argnames: str | Sequence[str] = (), donate_argnames: str | Sequence[str] = ()
) -> Callable[[Callable[P, R]], Jitted[P, R]]:
    """`jax.jit` as a decorator; its arguments mean what they mean there."""

    def compiled(function: Callable[P, R]) -> Jitted[P, R]:
        made: Any = jax.jit(function, static_argnames=static_argnames, donate_argnames=donate_argnames)
        return cast("Jitted[P, R]", made)

    return compiled


def require_array(
    name: str, value: Any, shape: tuple[int | None, ...], kind: Any = int, error: type[HKVError] = OperationError
) -> jax.Array:
    """The value as an array of a shape, None for any length, and of a dtype, or of any `int`, `float` or `bool`.

    Integers become int32; a number will do for the shape (). Any other value raises `error`, which names it `name`.
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

    For one that is split, the error says how to make it whole, or its pool as split as it is.
    """
    sharding: Any = getattr(jax.typeof(value), "sharding", None)
    spec = tuple(getattr(sharding, "spec", ()) or ())
    if any(axes is not None for axes in spec):
        expected = "a value that no axis splits: jax.reshard(value, jax.P()), or a pool a device (hkv.mesh)"
        raise error(name, f"{_described(value)} split as {sharding.spec}", expected)
    return value


def _described(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"

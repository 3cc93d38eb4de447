"""`jax.jit` that keeps a function's types, and shapes and dtypes of arrays that users hand over, asserted by chex.

Shapes and dtypes are known while a function is traced, so the checks cost nothing once it is compiled.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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


CONTENT = frozenset(
    ["buffer", "pool", "pools", "objects", "tensors", "values", "scales", "packets", "root", "roots", "keys", "query"]
)
"""Names of parameters whose arrays are bits, or numbers of their own dtype: no ids, positions or counts."""

TOKENS = frozenset({"tokens"})
"""Names of parameters of which two that differ must stay different."""

NO_ID = -(1 << 31)
"""Number in place of one that int32 cannot hold: below every id, position and count, and not -1, which is padding."""


def typed_jit(
    *, static_argnames: str | Sequence[str] = (), donate_argnames: str | Sequence[str] = ()
) -> Callable[[Callable[P, R]], Jitted[P, R]]:
    """`jax.jit` as a decorator; its arguments mean what they mean there.

    Integers are ids, positions and counts but for `CONTENT`. JAX cuts those of 64 bits to their lower halves, and
    uint32 has numbers that int32 has not: one that int32 cannot hold becomes `NO_ID`, which every operation drops and
    counts, or refuses. A token id that wide is an OperationError.
    """

    def compiled(function: Callable[P, R]) -> Jitted[P, R]:
        names = tuple(inspect.signature(function).parameters)

        def narrowed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
            given = [_narrow(name, value) for name, value in zip(names, args, strict=False)]
            return [*given, *args[len(names) :]], {name: _narrow(name, value) for name, value in kwargs.items()}

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            given, named = narrowed(args, kwargs)
            return cast("Any", function)(*given, **named)

        made: Any = jax.jit(traced, static_argnames=static_argnames, donate_argnames=donate_argnames)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            given, named = narrowed(args, kwargs)
            return made(*given, **named)

        for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
            setattr(called, name, getattr(made, name))
        return cast("Jitted[P, R]", called)

    return compiled


def _narrow(name: str, value: Any) -> Any:
    """An argument without integers that int32 cannot hold: on the host when it is called, else as it is traced."""
    if type(value) in (tuple, list) and name not in CONTENT:
        return type(value)(_narrow(name, each) for each in value)
    if not isinstance(value, np.ndarray | np.integer | jax.Array) or value.dtype in (np.int32, np.bool_):
        return value
    if not np.issubdtype(value.dtype, np.integer) or np.iinfo(value.dtype).max < 1 << 31 or name in CONTENT:
        return value
    on_host = not isinstance(value, jax.Array)
    if name in TOKENS:
        if on_host and value.dtype.itemsize > 4 and np.any((value < NO_ID) | (value >= 1 << 31)):
            raise OperationError(name, _described(value), "token ids of 32 bits")
        return value
    array: Any = np if on_host else jnp
    least = NO_ID if np.issubdtype(value.dtype, np.signedinteger) else 0
    holds = (value >= least) & (value <= (1 << 31) - 1)
    return array.where(holds, array.where(holds, value, array.zeros_like(value)).astype(np.int32), np.int32(NO_ID))


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

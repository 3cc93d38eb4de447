"""`jax.jit` that keeps a function's types, and shapes and dtypes of arrays that users hand over, asserted by chex.

Shapes and dtypes are known while a function is traced, so the checks cost nothing once it is compiled.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, cast

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


Ids = Annotated[jax.Array, "Ids"]
"""Annotation of parameters, and of tuples and unions in them, whose numbers are ids, positions, lengths or counts."""

NO_ID = -(1 << 31)
"""Number in place of one that int32 cannot hold: below every id, position and count, and not -1, which is padding."""


def typed_jit(
    *, static_argnames: str | Sequence[str] = (), donate_argnames: str | Sequence[str] = ()
) -> Callable[[Callable[P, R]], Jitted[P, R]]:
    """`jax.jit` as a decorator; its arguments mean what they mean there.

    Integers are content, bits or numbers of their own dtype, but in parameters that are annotated as `Ids`. JAX cuts
    those of 64 bits to their lower halves, and uint32 has numbers that int32 has not: an id that int32 cannot hold
    becomes `NO_ID`, which every operation drops and counts, or refuses. Content that would be cut is an OperationError.
    """

    def compiled(function: Callable[P, R]) -> Jitted[P, R]:
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        ids = {name for name in names if re.search(r"\bIds\b", str(parameters[name].annotation))}  # text or evaluated

        def narrow(name: str, value: Any) -> Any:
            return _narrow(value) if name in ids else _whole(name, value)

        def narrowed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
            given = [narrow(name, value) for name, value in zip(names, args, strict=False)]
            return [*given, *args[len(names) :]], {name: narrow(name, value) for name, value in kwargs.items()}

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


def _narrow(value: Any) -> Any:
    """Ids without numbers that int32 cannot hold: on the host when a function is called, else as it is traced."""
    if type(value) in (tuple, list):
        return type(value)(map(_narrow, value))
    if not _has_wide(value, np.int32):
        return value
    array: Any = jnp if isinstance(value, jax.Array) else np
    least = NO_ID if np.issubdtype(value.dtype, np.signedinteger) else 0
    holds = (value >= least) & (value <= (1 << 31) - 1)
    return array.where(holds, array.where(holds, value, array.zeros_like(value)).astype(np.int32), np.int32(NO_ID))


def _whole(name: str, value: Any) -> Any:
    """Content, if JAX keeps all bits of its integers."""
    if type(value) in (tuple, list):
        return type(value)(_whole(name, each) for each in value)
    if _has_wide(value, np.uint32) and not isinstance(value, jax.Array):
        cut = np.int32 if np.issubdtype(value.dtype, np.signedinteger) else np.uint32
        if np.any(value.astype(cut) != value):
            raise OperationError(name, _described(value), f"numbers that {np.dtype(cut)} holds")
    return value


def _has_wide(value: Any, widest: Any) -> bool:
    """True for integers of a type that has larger numbers than the widest one."""
    if not isinstance(value, np.ndarray | np.integer | jax.Array) or not np.issubdtype(value.dtype, np.integer):
        return False
    return np.iinfo(value.dtype).max > np.iinfo(widest).max


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

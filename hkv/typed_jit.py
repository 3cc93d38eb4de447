"""`jax.jit` that keeps a function's types."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax

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

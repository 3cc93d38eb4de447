"""Compiled forms of one function over lanes of states: jitted or not, batchable, and counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching

from hkv.machine import native_loops


class Programs:
    """The programs of an `execute(parameters, state, operations, **static)`, one for each choice of what is static.

    Args:
      execute: the function; its three arguments and all it returns have a leading axis of lanes.
    """

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute
        self._made: list[Any] = []
        self.batchable = functools.cache(self._batchable)
        self.jitted = functools.cache(self._jitted)

    def _jitted(self, **static: Any) -> Callable[..., Any]:
        program = jax.jit(self.batchable(**static), donate_argnums=(1,))
        self._made.append(program)
        return program

    def _batchable(self, **static: Any) -> Callable[..., Any]:
        """Form for a single state. Under `vmap`, states become lanes of one program, not selects over whole pools."""

        @custom_batching.custom_vmap
        def single(*arguments: Any) -> Any:
            native_loops.warn_if_interpreted()
            stacked = jax.tree.map(lambda x: jnp.expand_dims(x, 0), arguments)
            return jax.tree.map(lambda x: jnp.squeeze(x, 0), self._execute(*stacked, **static))

        @single.def_vmap
        def lanes(size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
            def stack(batched: bool, x: Any) -> Any:
                return x if batched else jnp.broadcast_to(x, (size, *jnp.shape(x)))

            native_loops.warn_if_interpreted()
            new = self._execute(*jax.tree.map(stack, tuple(in_batched), arguments), **static)
            return new, jax.tree.map(lambda _: True, new)

        return single

    def forget(self) -> None:
        """Forgets every compiled program: the next one is traced and compiled anew."""
        for program in self._made:
            program.clear_cache()
        self._made.clear()
        self.jitted.cache_clear()
        self.batchable.cache_clear()

    def count(self) -> int:
        """Number of compilations of jitted programs since `forget`."""
        return sum(program._cache_size() for program in self._made)

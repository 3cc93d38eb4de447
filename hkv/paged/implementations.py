"""Which code moves the runs: a name, or None for the best that the default device has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from hkv.errors import ConfigError
from hkv.paged import xla


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to gather and scatter runs.

    Attributes:
      gather_runs: as `hkv.paged.xla.gather_runs`.
      scatter_runs: as `hkv.paged.xla.scatter_runs`.
    """

    gather_runs: Callable[[jax.Array, jax.Array, int], jax.Array]
    scatter_runs: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


IMPLEMENTATIONS = {"xla": Implementation(xla.gather_runs, xla.scatter_runs)}
"""Implementations by name."""


def choose(name: str | None) -> Implementation:
    """The implementation of that name; for None, plain XLA, until another has been measured to be faster.

    Raises:
      ConfigError: there is no such implementation.
    """
    if name is None:
        name = "xla"
    if name not in IMPLEMENTATIONS:
        raise ConfigError("implementation", name, f"one of {', '.join(IMPLEMENTATIONS)}, or None")
    return IMPLEMENTATIONS[name]

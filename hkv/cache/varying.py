"""Values inside `jax.shard_map`, where JAX knows over which mesh axes each of them varies (`check_vma=True`).

Both branches of a conditional, and what a loop carries from trip to trip, have to vary over the same axes. Constants
vary over none: they are made like a value that is there (`jnp.zeros_like`), or marked here.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def varying_axes(value: jax.Array) -> frozenset[str]:
    """Mesh axes that a value varies over; none outside `jax.shard_map`."""
    kind: Any = jax.typeof(value)
    # JAX 0.10 keeps them in the manual axis type; others have `vma` itself.
    return frozenset(kind.mat.varying) if hasattr(kind, "mat") else frozenset(getattr(kind, "vma", ()))


def marked(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value, varying over `axes` too."""
    missing = tuple(sorted(axes - varying_axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def unified(*trees: Any) -> Any:
    """The same values as arrays, all varying over the mesh axes that any of them varies over."""
    values = jax.tree.map(jnp.asarray, trees)
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(values)))
    return jax.tree.map(lambda leaf: marked(leaf, axes), values)

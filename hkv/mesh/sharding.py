"""Page pools on a mesh: heads over `tensor`, tokens over `context`, requests over `data`; tables replicated. Jitted.

Each device holds a flat pool of its own, laid out as one rank's `Layout` says, in any order and kernel split. The
operations are those of `hkv.paged` under `shard_map`, and mean what they mean on one device that holds every head and
blocks of `block_size * token_ranks` tokens: ids, states and values are those of that one device. Only `gather` with
`assemble` communicates. What a single process does, several do alike, each with its own devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hkv import paged
from hkv.errors import ConfigError, LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.mesh.parallel_shape import ParallelShape, head_axis
from hkv.paged.operations import Values
from hkv.typed_jit import Ids, typed_jit

AXES = ("data", "tensor", "context")
"""Axes of the mesh, context innermost."""

Assemble = Literal["local", "context", "all"]
"""Result of `gather`: each rank's own states, those of all context ranks in order, or every head's as well."""


def make_mesh(shape: ParallelShape, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a shape over devices, the first of all processes' unless given, context innermost.

    Raises:
      ConfigError: too few devices; too many, where they are given.
    """
    count = shape.data * shape.tensor * shape.context
    found = list(jax.devices()[:count] if devices is None else devices)
    if len(found) != count:
        raise ConfigError("devices", len(found), f"{count}: {shape.data} x {shape.tensor} x {shape.context}")
    grid = np.empty(count, object)
    grid[:] = found
    return Mesh(grid.reshape(shape.data, shape.tensor, shape.context), AXES)


@dataclasses.dataclass(frozen=True)
class ShardedLayout:
    """Layout of a sharded cache: its devices, and one rank's layout on each. Hashable, a static argument.

    Raises:
      ConfigError: a mesh of other axes or sizes; an interleave that the layout does not allow.
      LayoutError: a layout of other heads than a rank holds.
    """

    mesh: Mesh
    shape: ParallelShape
    layout: Layout

    def __post_init__(self) -> None:
        expected = dict(zip(AXES, (self.shape.data, self.shape.tensor, self.shape.context), strict=True))
        if dict(self.mesh.shape) != expected or self.mesh.axis_names != AXES:
            raise ConfigError("mesh", dict(self.mesh.shape), f"{expected}, as the shape says")
        self.shape.check(self.layout)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of a pool `[data, tensor, context, words]`."""
        return NamedSharding(self.mesh, P(*AXES))

    @property
    def interleave(self) -> int:
        """States that stay together on a context rank."""
        return self.shape.interleave_states(self.layout)

    def zeros(self, words: int, dtype: Any = np.uint32) -> jax.Array:
        """Pools of zeros, unsigned `[data, tensor, context, words]`, made where they stay, one a device."""
        needed = -(-self.layout.end // np.dtype(dtype).itemsize)
        if words < needed:
            raise LayoutError("words", words, f"at least {needed} words of {np.dtype(dtype)} for the layout")
        shape = (*self.mesh.devices.shape, words)
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=self.sharding)()

    def specification(self, part: Part) -> P:
        """Partition of values `[data, tokens, heads, *part.shape]` of all heads; replicated where heads are."""
        axis = 1 + head_axis(self.layout, part, self.shape.heads_per_rank)
        return P("data") if self.shape.head_replicas > 1 else P("data", *(None,) * (axis - 1), "tensor")


@typed_jit(static_argnames=("sharded", "implementation"), donate_argnames="pool")
def write(
    pool: jax.Array,
    sharded: ShardedLayout,
    layer: Ids,
    blocks: Ids,
    states: Ids,
    values: Values,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """New keys and values, one state a token: `hkv.paged.write`, each rank its own heads and tokens.

    Args:
      pool: unsigned words `[data, tensor, context, words]`, donated.
      sharded: layout on the devices (static).
      layer: int32 scalar.
      blocks: int32 `[data, tokens]`, block of each token's slot; -1 writes nothing. No slot twice.
      states: int32 `[data, tokens]`, state within the virtual block.
      values: per part `[data, tokens, heads, *part.shape]`, all heads, sharded or not.
      implementation: as in `hkv.paged.write` (static).

    Returns:
      The pool, and how many slots did not exist, int32 `[data]`.

    Raises:
      LayoutError: a part that the layout has not, or values of another shape or dtype.
    """
    shape, layout = sharded.shape, sharded.layout
    _check_values(sharded, values)

    def local(pool, layer, blocks, states, values):
        context, within = shape.split(states[0], sharded.interleave)
        virtual = (states[0] >= 0) & (states[0] < shape.virtual_states(layout))
        mine = virtual if shape.token_ranks == 1 else virtual & (context == lax.axis_index("context"))
        chosen = {name: _own_heads(sharded, name, content[0]) for name, content in values.items()}
        ids = jnp.where(mine, blocks[0], -1)
        flat, _ = paged.write(pool.reshape(-1), layout, layer, ids, within, chosen, implementation)
        exists = virtual & _inside(layer, layout.num_layers) & _inside(blocks[0], layout.num_blocks)
        return flat.reshape(pool.shape), _count((blocks[0] != -1) & ~exists)

    parts = {name: sharded.specification(layout.part(name)) for name in values}
    specs = (P(*AXES), P(), P("data"), P("data"), parts)
    return _mapped(sharded, local, specs, (P(*AXES), P("data")))(pool, layer, blocks, states, dict(values))


@typed_jit(static_argnames=("sharded", "parts", "null_block", "assemble", "implementation"))
def gather(
    pool: jax.Array,
    sharded: ShardedLayout,
    layer: Ids,
    table: Ids,
    parts: tuple[str, ...] | None = None,
    null_block: int = 0,
    assemble: Assemble = "all",
    implementation: str | None = None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The states of the blocks that a block table names: `hkv.paged.gather`.

    Args:
      pool: unsigned words `[data, tensor, context, words]`.
      sharded: layout on the devices (static).
      layer: int32 scalar.
      table: int32 `[data, blocks]`, block ids in order.
      parts: names of the parts wanted (static); None for all.
      null_block: as in `hkv.paged.gather` (static).
      assemble: states that are brought together (static), see `Assemble`.
      implementation: as in `hkv.paged.write` (static).

    Returns:
      Per part, and how many ids did not exist, int32 `[data]`:

      * `local`: `[data, tensor, context, states, heads, *part.shape]`, each rank's own, no communication;
      * `context`: `[data, tensor, states, heads, *part.shape]`, states in the order of their tokens;
      * `all`: `[data, states, heads, *part.shape]`, every head once: what one device would return.

    Raises:
      ConfigError: another `assemble`.
      LayoutError: a part that the layout has not.
    """
    layout = sharded.layout
    outs = {"local": P(*AXES), "context": P("data", "tensor"), "all": P("data")}
    if assemble not in outs:
        raise ConfigError("assemble", assemble, f"one of {', '.join(outs)}")

    def local(pool, layer, table):
        names = parts or tuple(part.name for part in layout.content)
        found, dropped = paged.gather(pool.reshape(-1), layout, layer, table[0], names, null_block, implementation)
        joined = {}
        for name, content in found.items():
            # As words, since a collective may quiet a NaN.
            words = lax.bitcast_convert_type(content, f"uint{8 * content.dtype.itemsize}")
            if assemble != "local":
                words = _join_context(sharded, words, table.shape[1])
            if assemble == "all":
                words = _join_heads(sharded, name, words)
            words = words.reshape(*(1,) * len(outs[assemble]), *words.shape)
            joined[name] = lax.bitcast_convert_type(words, content.dtype)
        return joined, dropped[None]

    return _mapped(sharded, local, (P(*AXES), P(), P("data")), (outs[assemble], P("data")))(pool, layer, table)


@typed_jit(static_argnames=("sharded", "implementation"), donate_argnames="pool")
def copy_blocks(
    pool: jax.Array,
    sharded: ShardedLayout,
    sources: Ids,
    targets: Ids,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks, in every layer and on every rank: `hkv.paged.copy_blocks`; no communication.

    Args:
      pool: unsigned words `[data, tensor, context, words]`, donated.
      sharded: layout on the devices (static).
      sources: int32 `[data, copies]`.
      targets: int32 `[data, copies]`; none twice. A pair with a -1 copies nothing.
      implementation: as in `hkv.paged.write` (static).

    Returns:
      The pool, and how many pairs named a block that does not exist, int32 `[data]`.
    """

    def local(pool, sources, targets):
        flat, dropped = paged.copy_blocks(pool.reshape(-1), sharded.layout, sources[0], targets[0], implementation)
        return flat.reshape(pool.shape), dropped[None]

    specs = (P(*AXES), P("data"), P("data"))
    return _mapped(sharded, local, specs, (P(*AXES), P("data")))(pool, sources, targets)


@typed_jit(static_argnames=("sharded", "implementation"), donate_argnames="pool")
def zero_blocks(
    pool: jax.Array, sharded: ShardedLayout, blocks: Ids, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Zeros every byte of some blocks that carries data, on every rank: `hkv.paged.zero_blocks`; no communication.

    Args:
      pool: unsigned words `[data, tensor, context, words]`, donated.
      sharded: layout on the devices (static).
      blocks: int32 `[data, blocks]`; -1 zeros nothing.
      implementation: as in `hkv.paged.write` (static).

    Returns:
      The pool, and how many ids did not exist, int32 `[data]`.
    """

    def local(pool, blocks):
        flat, dropped = paged.zero_blocks(pool.reshape(-1), sharded.layout, blocks[0], implementation)
        return flat.reshape(pool.shape), dropped[None]

    return _mapped(sharded, local, (P(*AXES), P("data")), (P(*AXES), P("data")))(pool, blocks)


def _mapped(sharded: ShardedLayout, local: Any, in_specs: Any, out_specs: Any) -> Any:
    # Counts and what `all_gather` returns are equal on all ranks, which its types do not say: nothing to check.
    return jax.shard_map(local, mesh=sharded.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _own_heads(sharded: ShardedLayout, name: str, content: jax.Array) -> jax.Array:
    """This rank's heads: what it was given, or one of all where several ranks hold the same."""
    shape = sharded.shape
    if shape.head_replicas == 1:
        return content
    axis = head_axis(sharded.layout, sharded.layout.part(name), 1)
    first = lax.axis_index("tensor") // shape.head_replicas
    return lax.dynamic_slice_in_dim(content, first, 1, axis)


def _join_context(sharded: ShardedLayout, content: jax.Array, blocks: int) -> jax.Array:
    """States `[blocks * states, ...]` of this rank among those of all context ranks, in the order of their tokens."""
    ranks = sharded.shape.token_ranks
    if ranks == 1:
        return content
    states, *rest = content.shape
    turns = sharded.layout.states_per_block // sharded.interleave
    every = lax.all_gather(content, "context").reshape(ranks, blocks, turns, sharded.interleave, *rest)
    return jnp.moveaxis(every, 0, 2).reshape(ranks * states, *rest)


def _join_heads(sharded: ShardedLayout, name: str, content: jax.Array) -> jax.Array:
    """This rank's heads among those of all, each once."""
    shape = sharded.shape
    if shape.tensor == 1:
        return content
    axis = head_axis(sharded.layout, sharded.layout.part(name), shape.heads_per_rank)
    every = jnp.moveaxis(lax.all_gather(content, "tensor")[:: shape.head_replicas], 0, axis)
    return every.reshape(*content.shape[:axis], shape.heads, *content.shape[axis + 1 :])


def _check_values(sharded: ShardedLayout, values: Values) -> None:
    """Heads over all ranks; what is left, `hkv.paged.write` checks on each."""
    for name, content in values.items():
        part = sharded.layout.part(name)
        axis = 1 + head_axis(sharded.layout, part, sharded.shape.heads_per_rank)
        if content.ndim <= axis or content.shape[axis] != sharded.shape.heads:
            expected = f"{sharded.shape.heads} heads along axis {axis}, of all ranks together"
            raise LayoutError(f"values[{name!r}]", f"{content.dtype}{list(content.shape)}", expected)


def _inside(index: jax.Array, extent: int) -> jax.Array:
    return (index >= 0) & (index < extent)


def _count(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags, dtype=jnp.int32)[None]

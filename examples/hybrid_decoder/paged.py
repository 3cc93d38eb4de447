"""The forward pass over pages: what layers keep goes to blocks of one pool, at addresses that somebody gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.hybrid_decoder.kernel_attention import attend_by_kernel, readable
from examples.hybrid_decoder.layers import Parts, State, logits_of, scale_of
from examples.hybrid_decoder.model import DELTA, Model, Weights
from hkv.layout.block_layout import Layout
from hkv.paged.operations import gather, write

WHOLE = ("full", "mla")
"""Kinds whose queries read every token before them."""

Layouts = Mapping[str, Layout]
"""Layout of the pages of each kind."""


class Addresses(NamedTuple):
    """Slots of the new tokens of a step, and block tables of the earlier ones. From `hkv.cache.step`, or from a host.

    Attributes:
      tables: int32[R, G, W], the blocks of each row; 0 for none.
      blocks, offsets: int32[R, G, T], where each new token is written; -1 for none.
      start: int32[R], positions of the first new tokens.
      counts: int32[R], new tokens of each row, drafts included.
      states: int32[R], the block for each row's recurrent state after the step; -1 for none.
    """

    tables: jax.Array
    blocks: jax.Array
    offsets: jax.Array
    start: jax.Array
    counts: jax.Array
    states: jax.Array


@dataclasses.dataclass
class Pages:
    """The pool as a `Store` while a forward pass is traced; `pool` uint32[words] is what it has become so far.

    With `settled`, states are written as soon as they are known; else they wait in `states`. With `kernels`, attention
    to whole rows is JAX's paged-attention kernel where it can be.
    """

    model: Model
    layouts: Layouts
    pool: jax.Array
    addresses: Addresses
    settled: bool
    kernels: bool
    states: dict[int, State] = dataclasses.field(default_factory=dict)

    def attention(self, layer: int, new: Parts) -> Parts:
        """Writes the new tokens to their slots, then reads the whole rows."""
        kind, at = self._of(layer)
        group, where = self.model.group(kind), self.addresses
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in new.items()}
        slots = where.blocks[:, group].reshape(-1), where.offsets[:, group].reshape(-1)
        self.pool, _ = write(self.pool, self.layouts[kind], at, *slots, flat)
        tables = where.tables[:, group]
        found, _ = gather(self.pool, self.layouts[kind], at, tables.reshape(-1))
        return {name: array.reshape(tables.shape[0], -1, *array.shape[1:]) for name, array in found.items()}

    def by_kernel(self, layer: int, query: jax.Array, readers: jax.Array) -> jax.Array | None:
        """By JAX's kernel: one query a row, of kinds that read the whole row, from pages that it can read."""
        kind, at = self._of(layer)
        layout, alone = self.layouts[kind], query.shape[1] == 1
        if not (self.kernels and alone and kind in WHOLE and readable(layout)):
            return None
        table = self.addresses.tables[:, self.model.group(kind)]
        scaled = query[:, 0] * scale_of(query.shape[-1])
        return attend_by_kernel(layout, self.pool, at, scaled, table, readers[:, 0] + 1)[:, None]

    def recurrence(self, layer: int) -> State:
        """The state in the block that holds the token before the first new one; zeros before token 0."""
        kind, at = self._of(layer)
        column = (self.addresses.start - 1) // self.model.block_of(kind)
        block = block_at(self.addresses.tables[:, self.model.group(kind)], column)
        found, _ = gather(self.pool, self.layouts[kind], at, block)
        # Read once: else XLA may read again where the states are written, and keep a copy of the pool for that.
        parts = jax.lax.optimization_barrier((found["state0"], found["state1"]))
        return State(*(part[:, 0] for part in parts))

    def keep(self, layer: int, states: State) -> None:
        """Writes the state after all new tokens, or notes the states until it is known how many will stay."""
        if self.settled:
            where = self.addresses
            new = {layer: states}
            self.pool = write_states(self.model, self.layouts, self.pool, new, where.counts, where.states)
        else:
            self.states[layer] = states

    def _of(self, layer: int) -> tuple[str, jax.Array]:
        return self.model.layers[layer], jnp.int32(self.model.slot(layer))


def forward(
    model: Model,
    layouts: Layouts,
    weights: list[Weights],
    pool: jax.Array,
    tokens: jax.Array,
    addresses: Addresses,
    settled: bool,
    kernels: bool = False,
) -> tuple[jax.Array, jax.Array, dict[int, State]]:
    """Computes new tokens int32[R, T].

    Args:
      model: the sizes.
      layouts: of each kind.
      weights: a dict a layer.
      pool: uint32[words].
      tokens: int32[R, T].
      addresses: where they go.
      settled: static; whether all tokens stay. If not, recurrent states are answered, and `write_states` is due.
      kernels: static; whether the pool may be read by a GPU's kernels. They may read NaN where nothing was written.

    Returns:
      Logits [R, T, vocabulary], the pool, and for each recurrent layer its states after 0 to T tokens.
    """
    store = Pages(model, layouts, pool, addresses, settled, kernels)
    positions = jnp.minimum(addresses.start[:, None] + jnp.arange(tokens.shape[1]), model.longest - 1)
    logits = logits_of(model, weights, tokens, positions, addresses.counts, store)
    return logits, store.pool, store.states


def write_states(
    model: Model, layouts: Layouts, pool: jax.Array, states: dict[int, State], kept: jax.Array, blocks: jax.Array
) -> jax.Array:
    """Writes the states after `kept` int32[R] of a step's tokens to `blocks` int32[R], -1 for rows without any.

    Both parts of a state are one write, which needs both to be read before; and `kept` has to depend on every layer
    that reads a state, unless each layer is written by itself. Else XLA cannot tell that all is read before anything is
    overwritten, and copies the pool.
    """
    nothing = jnp.zeros_like(blocks)
    for layer, found in states.items():
        chosen = jax.tree.map(lambda array: array[kept, jnp.arange(kept.shape[0])], found)
        values = {"state0": chosen.inputs[:, None], "state1": chosen.memory[:, None]}
        pool, _ = write(pool, layouts[DELTA], jnp.int32(model.slot(layer)), blocks, nothing, values)
    return pool


def block_at(table: jax.Array, column: jax.Array) -> jax.Array:
    """The block of each row of int32[R, W] at a column int32[R]; 0 where the column is none."""
    inside = (column >= 0) & (column < table.shape[1])
    found = jnp.take_along_axis(table, jnp.where(inside, column, 0)[:, None], axis=1)[:, 0]
    return jnp.where(inside, found, 0)

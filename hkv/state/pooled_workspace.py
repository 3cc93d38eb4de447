"""Workspace of a compiled operation on pools: the arrays of one or more `PooledState`s, flat, and one lane of them.

Every index into them is computed here and nowhere else: rules name fields, never offsets. Counters stay in their array,
since there are some for each pool, and which pool is meant is known only at run time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from hkv.state.flat_arrays import TreeArrays
from hkv.state.loops import Scalar
from hkv.state.nodes import NODE_WORDS
from hkv.state.pooled import (
    COUNTER_WORDS,
    ITEM_WORDS,
    MARK_WORDS,
    POOL_WORDS,
    REQUEST_WORDS,
    ROLE_WORDS,
    SCRATCH,
    SPARE,
    TARGETS,
    Counter,
    Item,
    Mark,
    PoolCounter,
    PooledBuckets,
    PooledState,
)

ARRAYS = tuple(field.name for field in dataclasses.fields(PooledState))
"""Names of the arrays that loops carry."""

OUTPUTS = ("ids", "results")
"""Names of the outputs that loops carry as well."""


@dataclasses.dataclass(frozen=True)
class PooledSizes:
    """Static sizes: of one state, lanes, operations a lane, integers of a result, room for ids a lane (0: none are
    reported)."""

    buckets: PooledBuckets
    lanes: int
    operations: int
    width: int
    ids: int

    @property
    def nodes(self) -> int:
        """Nodes of the tree: arrays that say nothing are left out."""
        return self.buckets.nodes

    uses = nodes


@dataclasses.dataclass(frozen=True)
class PooledWorkspace(TreeArrays):
    """The arrays of `PooledState`, lanes one after the other and flat, and what belongs to one lane of them.

    Attributes:
      sizes: static sizes.
      bitmap, references, items, rows, chains, requests, counters, nodes, uses: as in `PooledState`.
      ids: int32[lanes * (ids + 1)], ids that operations report, one after the other.
      results: int32[lanes * (operations + 1) * width], one row an operation.
      lane: the lane that is worked on.
      num_ids: number of ids; those beyond the capacity of `ids` are counted, not written.
    """

    CARRIED = (*ARRAYS, *OUTPUTS)
    ROOMS = ("ids", "nodes", "uses")
    NODE_WIDTH = NODE_WORDS

    sizes: PooledSizes
    bitmap: jax.Array
    references: jax.Array
    items: jax.Array
    rows: jax.Array
    chains: jax.Array
    requests: jax.Array
    counters: jax.Array
    nodes: jax.Array
    uses: jax.Array
    ids: jax.Array
    results: jax.Array
    num_ids: Scalar

    # Indices.

    def word(self, pool: Scalar, level: int, word: Scalar) -> Scalar:
        """Index into `bitmap`."""
        buckets = self.sizes.buckets
        start = sum(buckets.levels[:level])
        return self._base(buckets.pools * buckets.bitmap) + pool * buckets.bitmap + start + word

    def reference(self, pool: Scalar, block: Any, role: Any) -> Scalar:
        """Index into `references`."""
        buckets = self.sizes.buckets
        return (
            self._base(buckets.pools * buckets.blocks * ROLE_WORDS)
            + (pool * buckets.blocks + block) * ROLE_WORDS
            + role
        )

    def item(self, key: Any, field: Item) -> Scalar:
        """Index into `items` of a word of a key."""
        return self._item(key) + int(field)

    def cached(self, key: Any, group: Any) -> Scalar:
        """Index into `items` of a key's block in a group."""
        return self._item(key) + ITEM_WORDS + group

    def _item(self, key: Any) -> Scalar:
        width = ITEM_WORDS + self.sizes.buckets.groups
        return self._base((self.sizes.buckets.keys + 2) * width) + key * width

    @property
    def ring(self) -> int:
        """The row of `items` at which the order of use begins and ends."""
        return self.sizes.buckets.keys

    def row(self, slot: Any, sequence: Any, group: Any) -> Scalar:
        """Index into `rows` of a list's first slot."""
        buckets = self.sizes.buckets
        size = (buckets.requests + 3) * buckets.sequences * buckets.groups * buckets.row
        return self._base(size) + ((slot * buckets.sequences + sequence) * buckets.groups + group) * buckets.row

    def chain(self, slot: Any, sequence: Any) -> Scalar:
        """Index into `chains` of a sequence's first key."""
        buckets = self.sizes.buckets
        size = (buckets.requests + 3) * buckets.sequences * buckets.chain
        return self._base(size) + (slot * buckets.sequences + sequence) * buckets.chain

    def length(self, slot: Any, sequence: Any, group: Any) -> Scalar:
        """Index into `requests` of a list's slots."""
        return self._record(slot) + REQUEST_WORDS + sequence * (self.sizes.buckets.groups + MARK_WORDS) + group

    def mark(self, slot: Any, sequence: Any, mark: Mark) -> Scalar:
        """Index into `requests` of a mark of a sequence."""
        return self.length(slot, sequence, self.sizes.buckets.groups + int(mark))

    def _record(self, slot: Any) -> Scalar:
        buckets = self.sizes.buckets
        width = REQUEST_WORDS + buckets.sequences * (buckets.groups + MARK_WORDS)
        return self._base((buckets.requests + 3) * width) + slot * width

    @property
    def scratch_slot(self) -> int:
        """Request slot in which intermediate values of the operation at hand are kept."""
        return self.sizes.buckets.requests + SCRATCH

    @property
    def targets_slot(self) -> int:
        """Request slot in which blocks wait for the sequences of a fork."""
        return self.sizes.buckets.requests + TARGETS

    @property
    def spare_slot(self) -> int:
        """A slot that no request has."""
        return self.sizes.buckets.requests + SPARE

    def counter(self, field: Counter) -> Scalar:
        """Index into `counters`."""
        return self._base(COUNTER_WORDS + POOL_WORDS * self.sizes.buckets.pools + 1) + int(field)

    def pool_counter(self, pool: Any, field: PoolCounter) -> Scalar:
        """Index into `counters` of a word of a pool."""
        return self.counter(Counter(0)) + COUNTER_WORDS + pool * POOL_WORDS + int(field)

    def emit(self, value: Any, condition: Any = True) -> Self:
        """Reports an id, if the condition holds; needs `ids` and `num_ids` to write."""
        if self.sizes.ids == 0:
            return self
        base = self._base(self.sizes.ids + 1)
        place = jnp.where(jnp.asarray(condition) & (self.num_ids < self.sizes.ids), self.num_ids, self.sizes.ids)
        work = self.write("ids", value, base + place)
        return work.replace(num_ids=work.num_ids + jnp.asarray(condition).astype(jnp.int32))

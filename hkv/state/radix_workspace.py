"""Workspace of a compiled operation on a radix tree: the arrays of one or more `RadixState`s, flat, and one lane of
them. Every index into them is computed here and nowhere else: rules name fields, never offsets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hkv.state.flat_arrays import TreeArrays
from hkv.state.loops import Scalar
from hkv.state.radix import (
    COUNT_WORDS,
    HELD_WORDS,
    KEY_WORDS,
    POOL_COUNT_WORDS,
    POOLS,
    RADIX_WORDS,
    Count,
    Key,
    PoolCount,
    RadixBuckets,
    RadixState,
)

ARRAYS = tuple(field.name for field in dataclasses.fields(RadixState))
"""Names of the arrays that loops carry."""

OUTPUTS = ("results",)
"""Names of the outputs that loops carry as well."""


@dataclasses.dataclass(frozen=True)
class RadixSizes:
    """Static sizes: of one state, lanes, operations a lane, integers of a result, room for ids a lane."""

    buckets: RadixBuckets
    lanes: int
    operations: int
    width: int
    ids: int = 0

    @property
    def nodes(self) -> int:
        """Rows of nodes."""
        return self.buckets.nodes


@dataclasses.dataclass(frozen=True)
class RadixWorkspace(TreeArrays):
    """The arrays of `RadixState`, lanes one after the other and flat, and what belongs to one lane of them.

    Attributes:
      sizes: static sizes.
      nodes, uses, keys, lists, bitmap, rows, chains, requests, counters: as in `RadixState`.
      results: int32[lanes * (operations + 1) * width], one row an operation.
      lane: the lane that is worked on.
    """

    CARRIED = (*ARRAYS, *OUTPUTS)
    ROOMS = ()
    NODE_WIDTH = RADIX_WORDS
    PINS = False

    sizes: RadixSizes
    nodes: jax.Array
    uses: jax.Array
    keys: jax.Array
    lists: jax.Array
    bitmap: jax.Array
    rows: jax.Array
    chains: jax.Array
    requests: jax.Array
    counters: jax.Array
    results: jax.Array

    # Indices.

    def key(self, key: Any, field: Key) -> Scalar:
        """Index into `keys` of a word of a key."""
        return self._base((self.sizes.buckets.keys + 1) * KEY_WORDS) + key * KEY_WORDS + int(field)

    def listed(self, pool: Any, place: Any) -> Scalar:
        """Index into `lists` of a place of a pool's ring, which goes around once."""
        return self._listed(pool) + self.around(place)

    def _listed(self, row: Any) -> Scalar:
        width = self.sizes.buckets.pages + 1
        return self._base((len(POOLS) + 1) * width) + row * width

    def around(self, place: Any) -> Scalar:
        """A place of a ring, which goes around once."""
        size = self.sizes.buckets.pages
        return jnp.where(place >= size, place - size, jnp.where(place < 0, place + size, place))

    def mapped(self, page: Any) -> Scalar:
        """Index into `lists` of the window page of a full page."""
        return self._listed(len(POOLS)) + page

    def word(self, pool: Any, level: int, word: Scalar) -> Scalar:
        """Index into `bitmap`, which pools take turns at."""
        levels = self.sizes.buckets.levels
        return self._base(sum(levels) + 1) + sum(levels[:level]) + word

    def row(self, slot: Any, page: Any) -> Scalar:
        """Index into `rows` of a page of a request."""
        return self._line(slot) + page

    def chain(self, slot: Any, page: Any) -> Scalar:
        """Index into `chains` of the key of a page of a request."""
        return self._line(slot) + page

    def _line(self, slot: Any) -> Scalar:
        buckets = self.sizes.buckets
        return self._base((buckets.requests + 2) * buckets.row) + slot * buckets.row

    def _record(self, slot: Any) -> Scalar:
        return self._base((self.sizes.buckets.requests + 2) * HELD_WORDS) + slot * HELD_WORDS

    @property
    def spare_slot(self) -> int:
        """A slot that no request has."""
        return self.sizes.buckets.requests + 1

    @property
    def lookup_slot(self) -> int:
        """The slot whose chain has the keys of a lookup without a request."""
        return self.sizes.buckets.requests

    def count(self, field: Count) -> Scalar:
        """Index into `counters`."""
        return self._base(COUNT_WORDS + POOL_COUNT_WORDS * len(POOLS) + 1) + int(field)

    def pool_count(self, pool: Any, field: PoolCount) -> Scalar:
        """Index into `counters` of a word of a pool."""
        return self.count(Count(0)) + COUNT_WORDS + pool * POOL_COUNT_WORDS + int(field)

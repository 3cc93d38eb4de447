"""A radix tree of page keys over tied pools of pages, and requests that hold paths of it.

The third arrangement of mechanisms besides `hkv.state.state` and `hkv.state.pooled`: free pages are lists whose order
counts, what is cached is a tree whose nodes are runs of pages, and a request's row is rewritten to what the tree has.

A key is the name of a page together with everything before it. So a key has one place in the tree, whichever node it
is in, and two things follow. Whether a prefix is cached is asked of its keys alone: those that have a page are the
first ones, and where they end is found by halving. And a node need not list its keys: it has the first of them, each
key has the next one, so that to split a node is to write one row, however long the node is.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Self

import jax
import numpy as np

from hkv.errors import ConfigError
from hkv.state import nodes
from hkv.state.buckets import require_addressable, require_positive
from hkv.state.nodes import NODE_WORDS, Node


class RadixNode(enum.IntEnum):
    """Words of a row of `RadixState.nodes` after those of `hkv.state.nodes.Node`. Row 0 is the root, without pages."""

    FIRST = NODE_WORDS
    """The key of its first page."""
    START = NODE_WORDS + 1
    """Pages before it."""
    END = NODE_WORDS + 2
    """Pages up to its end."""
    LOCKS = NODE_WORDS + 3
    """Requests that hold its full pages."""
    WINDOW_LOCKS = NODE_WORDS + 4
    """Requests that hold its window pages."""
    MARK = NODE_WORDS + 5
    """Name of the edge at which a window ends here; 0 for none."""
    HITS = NODE_WORDS + 6
    PRIORITY = NODE_WORDS + 7
    MADE = NODE_WORDS + 8
    """Number of the insertion that made it."""
    LIVE = NODE_WORDS + 9
    """1 if it has window pages, else 0."""
    NEWER = NODE_WORDS + 10
    """The node whose window pages were used next after its own; of the root the one used longest ago. Root: none."""
    OLDER = NODE_WORDS + 11
    """The one used next before; of the root the one used last."""
    STATE = NODE_WORDS + 12
    """The state after its last page, 0 for none."""
    STATE_LOCKS = NODE_WORDS + 13
    STATE_NEWER = NODE_WORDS + 14
    """As `NEWER` and `OLDER`, of nodes with a state."""
    STATE_OLDER = NODE_WORDS + 15


RADIX_WORDS = NODE_WORDS + len(RadixNode)
"""Words of a row of `RadixState.nodes`."""


class Key(enum.IntEnum):
    """Words of a row of `RadixState.keys`."""

    PAGE = 0
    """The full page that the tree has of it, 0 if it is not in the tree."""
    NEXT = 1
    """The key after it in the same node; of a node's last key, whatever was there."""
    HEAD = 2
    """The node that begins with it, 0 for none."""


KEY_WORDS = 4
"""Words of a row of `RadixState.keys`; the last one is spare."""


class RadixRequest(enum.IntEnum):
    """Words of a row of `RadixState.requests`. `PROTECTED`, `ENTERED`, `SLID` and `BRANCH` are in pages."""

    LIVE = 0
    """1 if the slot has a request, else 0."""
    TOKENS = 1
    PROMPT = 2
    PRIORITY = 3
    LENGTH = 4
    """Tokens that have slots."""
    PROTECTED = 5
    """Pages at the beginning of its row that are the tree's."""
    ENTERED = 6
    """Pages that it has entered."""
    SLID = 7
    """Pages of which, those of the tree apart, it has given the window's back."""
    RAN = 8
    """1 if it has computed a token since it came."""
    BRANCH = 9
    """Pages at which its first insertion ends; 0 for no such end."""
    NODE = 10
    """The node that it holds."""
    MARK = 11
    """End of the window's part of that lock; 0 for the root."""
    RELEASED = 12
    """1 if that part was given back."""
    STATE = 13
    """Its own state, 0 for none."""
    FIRST_TRACK = 14
    """Two states in turn that keep what it was."""
    SECOND_TRACK = 15
    TURN = 16
    """The one of the two that is written next."""
    TRACKED = 17
    """Tokens of the one written last, 0 for none since it was entered."""
    TRACKED_BEFORE = 18
    """Tokens of the other one, if a decoded token's since then, too; else 0."""


HELD_WORDS = 24
"""Words of a row of `RadixState.requests`."""


class Count(enum.IntEnum):
    """Indices into `RadixState.counters` of those that belong to no pool."""

    MARKS = 0
    """Names of edges so far."""
    MADE = 1
    """Insertions that made a node so far."""
    ROWS = 2
    """Rows of nodes that were ever used."""
    VACANT = 3
    """1 plus a row that is free again, linked by `Node.NEXT`; 0 for none."""
    DROPPED = 4
    """Slots that did not exist."""
    EVICTIONS = 5
    """Times that a node left, or lost its window's pages or its state, to make room."""


class PoolCount(enum.IntEnum):
    """Words of a pool in `RadixState.counters`."""

    FRONT = 0
    """Start of the list of its free pages in its ring."""
    FREE = 1
    """Pages in that list."""
    WAITING = 2
    """Pages that were given back and wait to be sorted in."""
    UNHELD = 3
    """Pages of nodes that nobody holds."""
    CAME = 4
    """Pages that nodes were given so far, by requests that entered them; around 2**32 it begins anew."""
    LEFT = 5
    """Pages that nodes have lost so far."""


COUNT_WORDS, POOL_COUNT_WORDS = 16, 8
"""Words of `RadixState.counters` before those of the pools, and of one pool."""

FULL, WINDOW, STATES = POOLS = range(3)
"""The pools: pages of full attention, pages of the window, states."""


@dataclasses.dataclass(frozen=True)
class RadixBuckets:
    """The sizes that are static. Everything else is data.

    Attributes:
      pages: most pages of a pool, the reserved page 0 included.
      keys: most distinct keys.
      requests: request slots.
      row: most pages of a request.
    """

    pages: int
    keys: int
    requests: int
    row: int

    def __post_init__(self) -> None:
        require_positive(self)
        arrays = {
            "pages": (self.nodes + 1) * RADIX_WORDS,
            "keys": (self.keys + 1) * KEY_WORDS,
            "row": (self.requests + 2) * self.row,
        }
        require_addressable(self, arrays)

    @property
    def nodes(self) -> int:
        """Rows of nodes: a page each at least, and the root in place of page 0."""
        return self.pages

    @property
    def groups(self) -> int:
        """Groups of layers at most: one a pool."""
        return len(POOLS)

    @property
    def places(self) -> int:
        """Places in the order in which nodes were used."""
        return nodes.places_of(self.nodes)

    @property
    def order_levels(self) -> tuple[int, ...]:
        """Words in each level of the bitmap of leaves' places."""
        return nodes.bitmap_levels(self.places)

    @property
    def levels(self) -> tuple[int, ...]:
        """Words in each level of a pool's bitmap."""
        return nodes.bitmap_levels(self.pages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RadixState:
    """A cache. Immutable; donate it to the operation that replaces it. Sizes are named in `RadixBuckets`.

    Every array ends in a spare element that holds nothing (`hkv.state.loops` says why).

    Attributes:
      nodes: int32[pages + 1, 24], the tree: `hkv.state.nodes.Node`, then `RadixNode`.
      uses: int32[words], the nodes in order of use (`hkv.state.pooled.PooledState.uses`).
      keys: int32[keys + 1, 4], `Key` of each.
      lists: int32[4, pages + 1], a ring of `pages` places for the free pages of each pool, in the order in which they
        are handed out from `PoolCount.FRONT` on, those behind them that wait to be sorted in; and the window page of
        each full page, 0 for none.
      bitmap: int32[words], a bitmap of pages that are being sorted (`hkv.state.nodes.bitmap_levels`); else empty.
      rows: int32[requests + 2, row], full pages of each request. The last two slots are for lookups without a request,
        and for nothing.
      chains: int32[requests + 2, row], keys of each request's whole pages.
      requests: int32[requests + 2, 24], `RadixRequest` of each.
      counters: int32[41], `Count`, then `PoolCount` of each pool.
    """

    nodes: jax.Array
    uses: jax.Array
    keys: jax.Array
    lists: jax.Array
    bitmap: jax.Array
    rows: jax.Array
    chains: jax.Array
    requests: jax.Array
    counters: jax.Array

    @property
    def buckets(self) -> RadixBuckets:
        """The sizes of an unbatched state, read off its shapes."""
        slots, row = self.rows.shape
        return RadixBuckets(pages=self.lists.shape[1] - 1, keys=self.keys.shape[0] - 1, requests=slots - 2, row=row)

    @property
    def mapping(self) -> jax.Array:
        """The window page of each full page, 0 for none."""
        return self.lists[len(POOLS)]

    def replace(self, **changes: jax.Array) -> Self:
        """The state with some arrays replaced."""
        return dataclasses.replace(self, **changes)


def empty_radix(buckets: RadixBuckets, num_pages: tuple[int, ...]) -> RadixState:
    """A cache in which nothing happened, as NumPy arrays: all pages of each pool but page 0 are free, in order.

    Raises ConfigError for more pools, or larger ones, than the buckets.
    """
    if len(num_pages) > len(POOLS) or not all(0 <= count < buckets.pages for count in num_pages):
        raise ConfigError("num_pages", num_pages, f"at most {len(POOLS)} pools of fewer than {buckets.pages} pages")
    slots = buckets.requests + 2
    tree = np.zeros((buckets.nodes + 1, RADIX_WORDS), np.int32)
    # The root is never a leaf, and never leaves.
    tree[0, Node.FLAGS] = nodes.PRESENT | nodes.BARRED
    counters = np.zeros(COUNT_WORDS + POOL_COUNT_WORDS * len(POOLS) + 1, np.int32)
    counters[Count.ROWS] = 1
    lists = np.zeros((len(POOLS) + 1, buckets.pages + 1), np.int32)
    for pool, count in enumerate(num_pages):
        lists[pool, :count] = np.arange(1, count + 1)
        counters[COUNT_WORDS + POOL_COUNT_WORDS * pool + PoolCount.FREE] = count
    return RadixState(
        nodes=tree,  # type: ignore[arg-type]
        uses=nodes.empty_nodes(buckets.nodes)[1],  # type: ignore[arg-type]
        keys=np.zeros((buckets.keys + 1, KEY_WORDS), np.int32),  # type: ignore[arg-type]
        lists=lists,  # type: ignore[arg-type]
        bitmap=np.zeros(sum(buckets.levels) + 1, np.int32),  # type: ignore[arg-type]
        rows=np.zeros((slots, buckets.row), np.int32),  # type: ignore[arg-type]
        chains=np.zeros((slots, buckets.row), np.int32),  # type: ignore[arg-type]
        requests=np.zeros((slots, HELD_WORDS), np.int32),  # type: ignore[arg-type]
        counters=counters,  # type: ignore[arg-type]
    )

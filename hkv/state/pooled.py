"""Pools of blocks that are held for several purposes, sequences that hold them, and a cache of keys in order of use.

The other arrangement of mechanisms than that of `hkv.state.state`: there the free queue is the cache; here free blocks
are a set of ids, and cached keys hold their blocks by references of their own.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Self

import jax
import numpy as np

from hkv.errors import ConfigError
from hkv.state import nodes
from hkv.state.buckets import require_addressable, require_growth, require_positive


class Role(enum.IntEnum):
    """Holders of references to a block: columns of `PooledState.references`."""

    REQUEST = 0
    CONNECTOR = 1
    CACHE = 2


ROLE_WORDS = 4
"""Columns of `PooledState.references`; the last one is spare."""


class Item(enum.IntEnum):
    """Words of a cached key in `PooledState.items`; its block in each group follows, 0 for none."""

    NEXT = 0
    """The key that was used next after it."""
    PREVIOUS = 1
    FLAGS = 2
    """0: not cached; else 1, plus 2 if it is never evicted, plus 4 times the namespace its dependency belongs to."""
    ORDINAL = 3
    """Place in the sequence it came from."""
    PARENT = 4
    """1 plus the key before it there, 0 for none."""


ITEM_WORDS = 8
"""Words of a row of `PooledState.items` before those of the groups."""


class PooledRequest(enum.IntEnum):
    """Words of a request in `PooledState.requests`. Lengths are in tokens."""

    LIVE = 0
    """1 if the slot has a request, else 0."""
    TOKENS = 1
    """Tokens of each sequence."""
    COMMON = 2
    """Tokens that all sequences share."""
    RESERVE = 3
    """Tokens to come in a step beyond the next one's."""
    BATCH = 4
    """Sequences."""
    WHOLE = 5
    """Keys of whole blocks in `PooledState.chains`."""
    KEYS = 6
    """Keys in use, that of a partly filled block among them; 0 for none yet."""
    ALIGNED = 7
    """1 if no key in use stands for a partly filled block, else 0."""


REQUEST_WORDS = 16
"""Words of a row of `PooledState.requests` before those of the sequences."""


class Mark(enum.IntEnum):
    """Words of a sequence in `PooledState.requests`, after the slots that it has in each group."""

    USES = 0
    """New sequences that go on from it, in a fork at work."""
    LEFT = 1
    """New sequences of the fork that are not made yet."""
    RECYCLED = 2
    """A bit for each group in which the fork gives its last block to another sequence."""


MARK_WORDS = 4
"""Words of `Mark`."""


class Counter(enum.IntEnum):
    """Indices into `PooledState.counters` of the counters that belong to no pool."""

    VERSION = 0
    """Number of changes to the cache, less one: -1 before the first."""
    EVICTIONS = 1
    """Blocks that eviction took out of the cache."""
    DROPPED = 2
    """Slots and blocks that did not exist, or were not held so; they were dropped."""


class PoolCounter(enum.IntEnum):
    """Words of a pool in `PooledState.counters`."""

    FREE = 0
    """Blocks without references."""
    HELD = 1
    """Blocks that a request or a connector holds."""


# More words than there are names: a counter that is added later moves nothing, and old states can be read.
COUNTER_WORDS, POOL_WORDS = 16, 4
"""Words of `PooledState.counters` before those of the pools, and of one pool."""

SCRATCH, TARGETS, SPARE = range(3)
"""Slots after the requests': where a list's growth is noted and new sequences are made, where blocks wait for a fork,
and the one that holds nothing."""


@dataclasses.dataclass(frozen=True)
class PooledBuckets:
    """The sizes that are static. Everything else is data.

    Attributes:
      blocks: most blocks of a pool, the reserved block 0 included.
      groups: most groups.
      pools: most pools, at most one a group.
      requests: request slots.
      sequences: most sequences of a request.
      row: most slots of a sequence in one group.
      chain: most keys of a sequence.
      keys: most distinct keys.
      names: nodes that each key has in the tree, one a namespace; 0 for no tree.
    """

    blocks: int
    groups: int
    pools: int
    requests: int
    sequences: int
    row: int
    chain: int
    keys: int
    names: int = 0

    def __post_init__(self) -> None:
        require_positive(self, zero=("names",))
        if self.pools > self.groups or self.groups > 32:
            raise ConfigError("groups", self.groups, "from the number of pools to 32")
        if self.row < self.sequences:
            raise ConfigError("row", self.row, f"at least the {self.sequences} sequences")
        arrays = {
            "blocks": self.pools * self.blocks * ROLE_WORDS,
            "keys": (self.keys + 2) * (ITEM_WORDS + self.groups),
            "names": (self.nodes + 1) * nodes.NODE_WORDS,
            "row": (self.requests + 3) * self.sequences * self.groups * self.row,
            "chain": (self.requests + 3) * self.sequences * self.chain,
        }
        require_addressable(self, arrays)

    @property
    def levels(self) -> tuple[int, ...]:
        """Words in each level of a pool's bitmap, the ids' own first; each bit of the next says where any are set."""
        return nodes.bitmap_levels(self.blocks)

    @property
    def bitmap(self) -> int:
        """Words of a pool's bitmap, a spare one included."""
        return sum(self.levels) + 1

    @property
    def nodes(self) -> int:
        """Nodes of the tree."""
        return self.keys * self.names

    @property
    def places(self) -> int:
        """Places in the order in which they were used."""
        return nodes.places_of(self.nodes)

    @property
    def order_levels(self) -> tuple[int, ...]:
        """Words in each level of the bitmap of leaves' places."""
        return nodes.bitmap_levels(self.places)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledState:
    """A cache. Immutable; donate it to the operation that replaces it. Sizes are named in `PooledBuckets`.

    Every array ends in a spare element that holds nothing (`hkv.state.loops` says why).

    Attributes:
      bitmap: int32[pools, words], the free ids: levels of words, the ids' own first, one bit an id; a bit
        of the next level is set where a word of the one below is not 0.
      references: int32[pools, blocks, 4], references to each block by `Role`.
      items: int32[keys + 2, 8 + groups], what is cached under each key (`Item`), linked in order of use. Row `keys` is
        the ring's beginning: its next is the key used least recently, its previous the one used last.
      rows: int32[requests + 3, sequences, groups, row], block ids, 0 for holes. The last slots are for work at hand.
      chains: int32[requests + 3, sequences, chain], keys of each sequence's whole blocks.
      requests: int32[requests + 3, 16 + sequences * (groups + 4)], `PooledRequest` of each request, then of each
        sequence: its slots in each group, and `Mark`.
      counters: int32[17 + 4 * pools], `Counter`, then `PoolCounter` of each pool.
      nodes: int32[keys * names + 1, 8], the tree (`hkv.state.nodes.Node`); a key's nodes are `key * names` and after.
      uses: int32[words], the nodes in order of use: `CLOCK` and `PASS`, the bitmap of leaves' places, level by level,
        and 1 plus the node at each place, 0 for none.
    """

    bitmap: jax.Array
    references: jax.Array
    items: jax.Array
    rows: jax.Array
    chains: jax.Array
    requests: jax.Array
    counters: jax.Array
    nodes: jax.Array
    uses: jax.Array

    @property
    def buckets(self) -> PooledBuckets:
        """The sizes of an unbatched state, read off its shapes."""
        slots, sequences, groups, row = self.rows.shape
        pools, blocks, _ = self.references.shape
        return PooledBuckets(
            blocks=blocks,
            groups=groups,
            pools=pools,
            requests=slots - 3,
            sequences=sequences,
            row=row,
            chain=self.chains.shape[2],
            keys=self.items.shape[0] - 2,
            names=(self.nodes.shape[0] - 1) // (self.items.shape[0] - 2),
        )

    def replace(self, **changes: jax.Array) -> Self:
        """The state with some arrays replaced."""
        return dataclasses.replace(self, **changes)


def empty_pooled(buckets: PooledBuckets, num_blocks: tuple[int, ...]) -> PooledState:
    """A cache in which nothing happened, as NumPy arrays: every block but block 0 of each pool is free.

    Raises ConfigError for more pools, or larger ones, than the buckets.
    """
    if len(num_blocks) > buckets.pools:
        raise ConfigError("num_blocks", num_blocks, f"at most the bucket's {buckets.pools} pools")
    for count in num_blocks:
        if not 1 <= count <= buckets.blocks:
            raise ConfigError("num_blocks", num_blocks, f"between 1 and the bucket's {buckets.blocks} for each pool")
    slots, sequences = buckets.requests + 3, buckets.sequences
    counters = np.zeros(COUNTER_WORDS + POOL_WORDS * buckets.pools + 1, np.int32)
    # RTP-LLM counts the version of its cache from the first insertion on, which makes it 0.
    counters[Counter.VERSION] = -1
    bitmap = np.zeros((buckets.pools, buckets.bitmap), np.int32)
    for pool, count in enumerate(num_blocks):
        counters[COUNTER_WORDS + POOL_WORDS * pool + PoolCounter.FREE] = count - 1
        bitmap[pool, :-1] = bitmap_of(range(1, count), buckets.levels)
    items = np.zeros((buckets.keys + 2, ITEM_WORDS + buckets.groups), np.int32)
    # An empty ring: its beginning is its own neighbour, so that linking needs no case for an empty list.
    items[buckets.keys, [Item.NEXT, Item.PREVIOUS]] = buckets.keys
    tree, uses = nodes.empty_nodes(buckets.nodes)
    return PooledState(
        bitmap=bitmap,  # type: ignore[arg-type]
        references=np.zeros((buckets.pools, buckets.blocks, ROLE_WORDS), np.int32),  # type: ignore[arg-type]
        items=items,  # type: ignore[arg-type]
        rows=np.zeros((slots, sequences, buckets.groups, buckets.row), np.int32),  # type: ignore[arg-type]
        chains=np.zeros((slots, sequences, buckets.chain), np.int32),  # type: ignore[arg-type]
        requests=np.zeros(  # type: ignore[arg-type]
            (slots, REQUEST_WORDS + sequences * (buckets.groups + MARK_WORDS)), np.int32
        ),
        counters=counters,  # type: ignore[arg-type]
        nodes=tree,  # type: ignore[arg-type]
        uses=uses,  # type: ignore[arg-type]
    )


def bitmap_of(ids: range, levels: tuple[int, ...]) -> np.ndarray:
    """All levels of the bitmap of a range of ids, one after the other."""
    members, words = np.zeros(32 * levels[0], bool), []
    members[ids.start : ids.stop] = True
    for size in levels:
        padded = np.zeros(32 * size, bool)
        padded[: len(members)] = members
        words.append(np.packbits(padded, bitorder="little").view("<i4"))
        members = words[-1] != 0
    return np.concatenate(words)


def members_of(bitmap: np.ndarray, levels: tuple[int, ...]) -> list[int]:
    """The ids in one pool's bitmap, ascending. Host-only."""
    words = np.ascontiguousarray(np.asarray(bitmap)[: levels[0]]).astype("<i4")
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def resized(state: PooledState, buckets: PooledBuckets) -> PooledState:
    """The same cache with more room, as NumPy arrays. Host-only. Blocks, groups, pools and names stay as they are.

    Raises ConfigError for a size that is smaller, or that cannot change.
    """
    old = state.buckets
    require_growth(old, buckets, ("requests", "sequences", "row", "chain", "keys"))
    new = empty_pooled(buckets, (1,) * buckets.pools)
    requests, sequences = old.requests, old.sequences
    rows, chains, items = np.array(new.rows), np.array(new.chains), np.array(new.items)
    rows[:requests, :sequences, :, : old.row] = np.asarray(state.rows)[:requests]
    chains[:requests, :sequences, : old.chain] = np.asarray(state.chains)[:requests]
    records = np.array(new.requests)
    width = REQUEST_WORDS + sequences * (old.groups + MARK_WORDS)
    records[:requests, :width] = np.asarray(state.requests)[:requests]
    items[: old.keys] = np.asarray(state.items)[: old.keys]
    items[buckets.keys] = np.asarray(state.items)[old.keys]
    # Rows of keys that are not cached are zeros, and 0 is a key: only links of those that are in the ring are
    # followed to where its beginning stands now.
    links = items[:, [Item.NEXT, Item.PREVIOUS]]
    present = (items[:, Item.FLAGS] != 0) | (np.arange(len(items)) == buckets.keys)
    items[:, [Item.NEXT, Item.PREVIOUS]] = np.where(present[:, None] & (links == old.keys), buckets.keys, links)
    tree, uses = nodes.moved_nodes(np.asarray(state.nodes), np.asarray(state.uses), buckets.nodes)
    return new.replace(
        bitmap=np.array(state.bitmap),  # type: ignore[arg-type]
        references=np.array(state.references),  # type: ignore[arg-type]
        items=items,  # type: ignore[arg-type]
        rows=rows,  # type: ignore[arg-type]
        chains=chains,  # type: ignore[arg-type]
        requests=records,  # type: ignore[arg-type]
        counters=np.array(state.counters),  # type: ignore[arg-type]
        nodes=tree,  # type: ignore[arg-type]
        uses=uses,  # type: ignore[arg-type]
    )

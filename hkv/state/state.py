"""State of a cache between operations: nine arrays, and the buckets that give them their shapes.

What vLLM keeps in objects (`KVCacheBlock`, `FreeKVCacheBlockQueue`, `BlockHashToBlockMap`, `req_to_blocks`,
`num_cached_block`) stands here in columns of int32: one dtype, so that a handful of arrays suffices, and every field of
a request is a read at a constant offset. Fields are named by enumerations and read by name (`hkv.state.workspace`).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Self

import jax
import numpy as np

from hkv.errors import ConfigError


class Counter(enum.IntEnum):
    """Indices into `State.counters`."""

    HEAD = 0
    """Place in the queue's ring of the next block to hand out, before masking."""
    TAIL = 1
    """Place after the last one, before masking."""
    FREE = 2
    """Blocks in the queue."""
    EVICTIONS = 3
    """Blocks whose keys were dropped because they were handed out."""
    DROPPED = 4
    """Ids that did not exist, and were dropped."""
    CLOCK = 5
    """Operations performed that may have changed what a lookup finds."""
    RUNNING = 6
    """Requests that hold blocks."""
    STEP = 7
    """Scheduling steps begun."""


class Request(enum.IntEnum):
    """Columns of `State.requests` that describe the request itself. Lengths are in tokens."""

    LIVE = 0
    """0: the slot is empty; 1: waiting; 2: running."""
    COMPUTED = 1
    TOKENS = 2
    """Prompt and output, drafts excluded."""
    PROMPT = 3
    IN_FLIGHT = 4
    KEYS = 5
    """Prefix keys in `State.chains`."""
    SHARED_PREFIX = 6
    HIT = 7
    """Tokens the last lookup found, -1 for none."""
    HIT_CLOCK = 8
    """`Counter.CLOCK` at that lookup."""
    KNOWN = 9
    """1 if any group adopted or registered blocks (vLLM 0.33: the request is in some `num_cached_block`), else 0."""

    GRANTED = 10
    """Tokens that have slots, lookahead ones not counted."""
    NOOP_UNTIL = 11
    """Tokens, lookahead ones included, up to which a dialect noted that an allocation is a no-op."""
    GRANT_STEP = 12
    """`Counter.STEP` when it was last granted blocks, 0 for never; kept only where blocks have parts."""
    WRITTEN = 13
    """Tokens up to which its blocks were written when that step began."""
    JOINED = 14
    """1 if that step admitted it: the blocks up to there are a hit's, every other one was new; else 0."""


# More words than names, a power of two: a field that is added moves no other, and indices are shifts.
REQUEST_WORDS = 16
"""Words at the front of a row of `State.requests`; `GROUP_WORDS` for each group follow."""


class Row(enum.IntEnum):
    """Columns of `State.requests` that describe the request's row in one group. Units are blocks."""

    LENGTH = 0
    """Entries of the row, null ones included."""
    FIRST = 1
    """Entries before this one are null; `State.rows` does not say so. Where a dialect keeps the beginning of rows, only
    those between are, and `State.rows` says so."""
    CACHED = 2
    """Entries already looked at for registration."""
    HIT_FIRST = 3
    """First entry that is not null in what the last lookup found."""
    HIT_LENGTH = 4
    """Tokens that the last lookup found in this group alone."""
    NEW_FIRST = 5
    """First entry that the last allocation that made any row longer added."""
    PARTIAL = 6
    """1 plus the entry whose block is registered before it is full: it is copied before the request writes on. 0:
    none."""
    GROWN = 7
    """1 once the request was given scratch, the row's last entries; means nothing while the row is empty."""
    EXPORT = 8
    """Tokens whose state the chunk at hand leaves behind for others; 0: none. Means nothing while the row is empty."""
    EXPORT_ENTRY = 9
    """The entry whose block takes that state."""
    HIT_SHORT = 10
    """Entries by which the hit that is to be adopted is shorter, in this group, than its tokens say."""
    STANDING = 11
    """Bit `entry % 32` of each entry from `CACHED` on whose block holds another state than its end's, and its key."""
    BEGUN = 12
    """1 plus the entry inside which the chunk with `EXPORT` began, whose state it leaves as it was. 0: none."""


GROUP_WORDS = 16
"""Words of one group in a row of `State.requests`."""

# Values of the table say why a lookup misses, so that a replay finds the cause without a log of what happened.
NEVER_SEEN = 0
"""Value in `State.table`: no block ever had this key."""
EVICTED = -1
"""Value in `State.table`: the last block with this key was handed out, or its keys were taken away."""
RETIRED = -2
"""Value in `State.table`: no block has this key, and when its span was last due, the span's block was null already."""
NOT_RETAINED = -3
"""Value in `State.table`: no block has this key, and when its span was last due, retention left it out.

Values below it say `EVICTED` and more: in which step, and for which group (`hkv.state.key_table.evicted_for`)."""


# The entry of a key shares an int32 with two flags, and 0 means no key.
ENTRIES = 1 << 29
"""Entries that a table has fewer of: four times one, and 3 more, is a positive int32 in `State.keys`."""


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes that are static. Everything else is data: configurations that share buckets share executables.

    Attributes:
      blocks: most blocks in the pool, the null block included.
      requests: request slots.
      groups: columns of the key table, a power of two: one more than the most groups.
      row: most blocks a request may have in one group.
      chain: most prefix keys a request may have.
      keys: most distinct prefix keys.
      parts: most prefix keys that end inside one block: the largest ratio of block size to hash block size, less 1.
      beside: words of a row of `State.keys`, the last ones, that a cache leaves to whoever replays it.
    """

    WRITTEN_WORDS = 2
    """Last words of a row of `State.keys`: the step that registered a block with parts, and how far it was written."""

    blocks: int
    requests: int
    groups: int
    row: int
    chain: int
    keys: int
    parts: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("parts", "beside") else 1
            if type(value) is not int or value < least:
                raise ConfigError(name, value, f"an integer of at least {least}")
        if self.groups & (self.groups - 1):
            raise ConfigError("groups", self.groups, "a power of two")
        if (self.keys + 1) * self.groups >= ENTRIES:
            raise ConfigError("keys", self.keys, f"fewer than {ENTRIES // self.groups} keys for {self.groups} groups")
        if 2 * self.blocks + 4 * self.groups * self.row >= 1 << 28:
            raise ConfigError(
                "blocks", self.blocks, "fewer than 2**27 blocks, less twice the entries of a request's rows"
            )

    @property
    def key_words(self) -> int:
        """Words of a row of `State.keys`."""
        return 1 + self.parts + (self.WRITTEN_WORDS if self.parts else 0) + self.beside

    @property
    def queue(self) -> int:
        """Places in the queue's ring: a power of two, room for all blocks twice and for what a request gives back."""
        return 1 << (2 * self.blocks + 4 * self.groups * self.row - 1).bit_length()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A cache. Immutable; donate it to the operation that replaces it. Sizes are named in `Buckets`.

    Every array ends in spare elements that hold nothing (`hkv.state.loops` says why): the last place of `queue`, the
    last row of `blocks`, `keys`, `links`, `table`, `rows`, `chains` and `requests`, the last counter.

    Attributes:
      queue: int32[Q + 1], the free queue: a ring of Q places, a power of two. Places `head` to `tail` hold block ids,
        the next to be handed out first, with 0 where a block was taken out of the middle.
      blocks: int32[blocks + 1], each block's whereabouts: above 0, its place in the ring plus 1; below 0, minus its
        reference count; 0, neither (the null block, and blocks beyond the pool).
      keys: int32[blocks + 1, 1 + parts], the keys of each block. Column 0: `(entry + 1) * 4` of the key of the whole
        block or 0, plus 2 if there are keys that end inside it, plus 1 if its entry says more than where the block is;
        column p: `entry + 1` of the one that ends p hash blocks into it, or 0. An entry is `key * groups + column`, a
        place in `table`. Where blocks have parts, two columns more: the step in which the block was last registered
        though it was not written to its end, and how many tokens of it that step found written.
      table: int32[keys + 1, groups], by key and group. Above 0: 8 times the block that was registered first, plus 2
        times what to say when it is gone (0: `EVICTED`, 1: `RETIRED`, 2: `NOT_RETAINED`), plus 1 if others have the
        same key. Otherwise why no block has it: `NEVER_SEEN`, `EVICTED` (or a value below all these, which says
        when and for which group), `RETIRED`, `NOT_RETAINED`. The last column belongs to no group: there a
        dialect may note the step in which a key was last registered.
      links: int32[blocks + 1, 2 + 2 * parts], next and previous block with the same key, for each of a block's keys,
        in a ring, in order of registration; meaningful only where `table` says that there are several.
      rows: int32[requests + 1, groups, row], block ids of each request; the last lookup's blocks while it waits.
      chains: int32[requests + 1, chain], prefix keys of each request, one a hash block.
      requests: int32[requests + 1, 16 + 16 * groups], what each request knows of itself (`Request`) and of its row in
        each group (`Row`).
      counters: int32[16], the queue's ends and what was counted (`Counter`).
    """

    queue: jax.Array
    blocks: jax.Array
    keys: jax.Array
    table: jax.Array
    links: jax.Array
    rows: jax.Array
    chains: jax.Array
    requests: jax.Array
    counters: jax.Array

    @property
    def buckets(self) -> Buckets:
        """The sizes of an unbatched state, read off its shapes."""
        slots, groups, row = self.rows.shape
        parts = self.links.shape[-1] // 2 - 1
        return Buckets(
            blocks=self.blocks.shape[0] - 1,
            requests=slots - 1,
            groups=groups,
            row=row,
            chain=self.chains.shape[1],
            keys=self.table.shape[0] - 1,
            parts=parts,
            beside=self.keys.shape[1] - 1 - parts - (Buckets.WRITTEN_WORDS if parts else 0),
        )

    def replace(self, **changes: jax.Array) -> Self:
        """The state with some arrays replaced."""
        return dataclasses.replace(self, **changes)


def empty(buckets: Buckets, num_blocks: int) -> State:
    """A cache in which nothing happened, as NumPy arrays: every block but the null block is free, in order of its id.

    Raises ConfigError if the pool does not fit its bucket.
    """
    if not 1 <= num_blocks <= buckets.blocks:
        raise ConfigError("num_blocks", num_blocks, f"between 1 and the bucket's {buckets.blocks}")
    queue = np.zeros(buckets.queue + 1, np.int32)
    queue[: num_blocks - 1] = np.arange(1, num_blocks, dtype=np.int32)
    blocks = np.zeros(buckets.blocks + 1, np.int32)
    # The block with id i stands at place i - 1, and what is noted is the place plus 1: the same numbers.
    blocks[1:num_blocks] = queue[: num_blocks - 1]
    counters = np.zeros(16, np.int32)
    # From 1 on, so that 0 means "never" in every field that holds a step.
    counters[Counter.STEP] = 1
    counters[Counter.TAIL] = counters[Counter.FREE] = num_blocks - 1
    width = 1 + buckets.parts
    return State(
        queue=queue,  # type: ignore[arg-type]
        blocks=blocks,  # type: ignore[arg-type]
        keys=np.zeros((buckets.blocks + 1, buckets.key_words), np.int32),  # type: ignore[arg-type]
        table=np.zeros((buckets.keys + 1, buckets.groups), np.int32),  # type: ignore[arg-type]
        links=np.zeros((buckets.blocks + 1, 2 * width), np.int32),  # type: ignore[arg-type]
        rows=np.zeros((buckets.requests + 1, buckets.groups, buckets.row), np.int32),  # type: ignore[arg-type]
        chains=np.zeros((buckets.requests + 1, buckets.chain), np.int32),  # type: ignore[arg-type]
        requests=np.zeros(  # type: ignore[arg-type]
            (buckets.requests + 1, REQUEST_WORDS + GROUP_WORDS * buckets.groups), np.int32
        ),
        counters=counters,  # type: ignore[arg-type]
    )

"""Arrays of a second tier in a workspace, and their words: chunks, users, jobs, and what requests were told.

Under LRU the requests that used chunks are nodes of one list in the order in which chunks leave: a request stands for
all chunks that it used last, ended or not. These are found by its prefix keys, the last position first, and by a bit
for each key and group in `marks`. ARC has lists of the chunks themselves.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from hkv.state import loops
from hkv.state.loops import Scalar
from hkv.state.workspace import Workspace


class ChunkNode(enum.IntEnum):
    """Words of a row of `nodes`, of a chunk; those of a request are `User`."""

    READERS = 0
    """Transfers that read it; -1 while one writes it."""
    OWNER = 1
    """1 plus the request that used it last; of ARC, 1 if several requests have used it."""
    LINK = 2
    """While it is written, 1 plus the next chunk of its job, 0 for none; then the number of the last offer of it."""
    BLOCK = 3
    """While it is written, the block that it is written from, negative while that is not fenced; then `READ` and
    `LOADING`."""
    ENTRY = 4
    """Its place in `where`; this and the next are ARC's alone."""
    NEXT = 5
    PREVIOUS = 6


class User(enum.IntEnum):
    """Words of some rows of `nodes`, of a request."""

    JOBS = 0
    """Its jobs that go on."""
    IDLE = 1
    """Idle chunks that it stands for."""
    NUMBER = 2
    """Number of its first use of a chunk, later of its end: numbers rise."""
    NEXT = 3
    PREVIOUS = 4
    LOADED = 5
    """Tokens that were loaded for it when it was first admitted."""
    FLAGS = 6
    """`WAITED`, `ENDED`."""
    OWNED = 7
    """Chunks that it stands for."""
    CURSOR = 8
    """None of them is at this place among its keys, or behind it."""
    PARTED = 9
    """Nor, from here on, any chunk that it used and that others stand for by now."""


WAITED, ENDED = 1, 2
"""Bits of `User.FLAGS`: it was put aside once, because a chunk was on its way; it has ended."""

USER_WORDS = 16

READ, LOADING = 1, 2
"""Bits of `ChunkNode.BLOCK` of a chunk that can be read: it was read once; it is being loaded while others run."""

NOT_OFFERED, TOO_SELDOM, NO_ROOM, EVICTED = 0, -1, -2, -3
"""Values of `where` that say why there is no chunk."""

GHOST = -4
"""Value of `where` of a name that ARC remembers in row 0 of `ghosts`; row `n` is `GHOST - n`."""


class GhostWord(enum.IntEnum):
    """Words of a row of `ghosts`."""

    ENTRY = 0
    NEXT = 1
    """The next one of its list; of a row that came back, 1 plus the next such row."""
    PREVIOUS = 2
    STATE = 3
    """1 if several requests had used it; 2 more if there was no room for it since it left."""


class ArcWord(enum.IntEnum):
    """Words of `arc`."""

    ONCE = 0
    """Chunks that one request used."""
    OFTEN = 1
    GONE_ONCE = 2
    """Names of such that left."""
    GONE_OFTEN = 3
    WHOLE = 4
    """The target: whole chunks, and two words behind the point."""
    HIGH = 5
    LOW = 6
    ROWS = 7
    """Rows of `ghosts` that were handed out."""
    FREE = 8
    """1 plus a row that came back; 0 for none."""


class TrackerWord(enum.IntEnum):
    """Words of a row of `tracker`; OFFERS of the row of ends: rows that were handed out."""

    ENTRY = 0
    OFFERS = 1
    NEXT = 2
    PREVIOUS = 3


class Handed(enum.IntEnum):
    """Words of a block beside its keys, which whoever hands it out has at hand: blocks come in any order."""

    STEP = 0
    """The step in which it was handed out or adopted last."""
    FENCE = 1
    """1 plus the row of the job that reads it, where it may be handed out; `SEVERAL` for more than one."""


SEVERAL = -1


class SlotWord(enum.IntEnum):
    """Words of a slot in `tables`."""

    END = 0
    """The step at whose end its load is done."""
    STATE = 1
    """0: nothing is loaded; 1: a load goes on; 2: it has ended; 3: and was registered."""
    BEGAN = 2
    OFFERS = 3
    """Tokens from which on it has something to offer."""
    STEP = 4
    """The step in which all its blocks were told."""


FOREVER = 2**31 - 1
"""Value of `told` of an entry that counts as its request's, whatever becomes of its block."""

LOADS, LOADED, SETTLED = 1, 2, 3
"""Values of `SlotWord.STATE`."""


class ToldRow(enum.IntEnum):
    """Words of a slot and a group in `tables`; units are blocks."""

    LENGTH = 0
    """Entries that were told."""
    FIRST = 1
    """Those before it were null when all were told."""
    WHOLE = 2
    """Entries told with all others; the later ones have their steps in `told`."""
    CURSOR = 3
    """The entry from which on it offers."""
    LOAD_FIRST = 4
    LOAD_END = 5
    HANDED_OVER = 6
    """Of states: entries before it were handed over."""


SLOT_WORDS = ROW_WORDS = 8


class Job(enum.IntEnum):
    """Words of a row of `jobs`."""

    REQUEST = 0
    END = 1
    """The step at whose end it is reported."""
    FIRST = 2
    """1 plus its first chunk; 0 once it was reported."""
    FLUSHED = 3


JOB_WORDS = 4


class TierField(enum.IntEnum):
    """Columns of the tier's parameters of a group."""

    WINDOW = 0
    """Chunks before a length that resuming there takes; 0 for all."""
    SPAN = 1
    """Tokens before a query that a sliding window keeps; -1 for other groups."""
    ORDER = 2
    """Of row j, the group that is looked up as the j-th."""
    MASKED = 3
    """1 if only some chunks are offered: the last KEEP of every PERIOD, and those before expected ends."""
    KEEP = 4
    PERIOD = 5
    ENDS = 6
    """1 if the prompt's end and the shared prefix are expected ends, rounded down to ALIGNMENT."""
    HORIZON = 7
    """1 if the last segment's end is one."""
    STATE = 8
    """1 if chunks are states, which the cache hands over; the request offers none itself."""


class TierNumber(enum.IntEnum):
    """Columns of the tier's other parameters."""

    CAPACITY = 0
    WINDOWS = 1
    """The place in the order of lookups of the first group that needs the last chunks alone."""
    PROMPT_ONLY = 2
    ALIGNMENT = 3
    WHOLE_HEADS = 4
    """1 if the head that the GPU has counts as used when the tail is loaded."""
    LIMITED = 5
    """1 if transfers take more than a step."""
    SLOWER = 6
    """1 if it is asked which loads took longer than computing again."""
    THRESHOLD = 7
    TRACKED = 8
    """Chunks whose offers are counted at most."""
    GRID = 9
    """Tokens that a lookup's length is rounded down to beside states, before any group is asked; else 1."""
    REVIVES = 10
    """1 if blocks of chunks that were offered once count as the request's, though they were handed out since."""


TIER_WORDS = 11

ARRAYS = (
    *("nodes", "frees", "where", "marks", "told", "tables", "jobs", "lists", "offers"),
    *("arc", "ghosts", "tracker", "tracked"),
)
"""Names of the arrays."""

COUNTS = (
    *("idle", "unused", "handed_out", "last", "stamp", "first_job", "next_job", "urgent", "loading"),
    *("held", "visited", "kept", "aside", "ended", "local", "external", "retired", "reserved"),
    *("load_step", "load_high", "load_low", "store_step", "store_high", "store_low"),
    *("stored", "read_once", "loaded", "evicted", "refused", "peak", "flushed", "waits", "wait_steps", "loads"),
    *("load_steps", "slower", "loaded_tokens", "load_chunks", "lacked_0", "lacked_1", "lacked_2", "lacked_3"),
    *("handing", "overflow"),
)
"""Names of the scalars, in the order in which they are kept between dispatches."""


@dataclasses.dataclass(frozen=True)
class TierArrays(Workspace):
    """A cache with the flat arrays of its second tier, a lane only.

    Attributes:
      nodes: int32[chunks * node_words + (users + 3) * 16], `ChunkNode` of chunks, `User` of requests, and as many words
        each for the ends of two lists and a spare.
      frees: int32[chunks + 1], a stack of chunks that came back.
      where: int32[(keys + 1) * groups], by key and group, 1 plus its chunk, or the reason why it has no chunk.
      marks: int32[trace keys + 1], groups in which the request has used the chunk that ends there, a bit each.
      told: int32, shaped as `rows`: the step in which an entry was told; -1 where it was gone when a cursor passed it,
        `FOREVER` where it was not, and nobody looks any more.
      tables: int32[(slots + 1) * (8 + 8 * groups)], `SlotWord` and `ToldRow`.
      jobs: int32[(jobs + 1) * 4], a ring of stores that go on, `Job`.
      lists: int32[slots + 1 + 2 * (users + 1)], slots whose loads go on, then requests that ended, with their slots;
        beside states slots + 1 more, those that hand some over.
      offers: int32[2 * (entries + 1)], entries and blocks of one offer; of ARC 4 words each, with places in `marks`.
      arc: int32[10], `ArcWord`; of LRU, it and the next are empty.
      ghosts: int32[(2 * chunks + 3) * 4], `GhostWord` of each name that ARC remembers, the ends of both lists, a spare.
      tracker: int32[(tracked + 2) * 4], `TrackerWord` of chunks whose offers are counted, the list's ends, a spare;
        empty without a threshold, as is the next.
      tracked: int32[(keys + 1) * groups], by key and group, 1 plus its row in `tracker`.
      idle: chunks that no transfer reads or writes.
      unused: chunks in `frees`.
      handed_out: chunks below this have been handed out.
      last: the last number given.
      stamp: number of the last offer.
      first_job, next_job: ends of the ring of jobs.
      urgent: jobs that were flushed and are not reported.
      loading: loads that go on.
      held, visited, kept: slots in the list; of these visited by the step; of these, those that stay.
      aside: requests put aside by the step, in `stack` from its end downward.
      ended: requests that ended since the last step.
      local, external: tokens of the head of the queue that the GPU has, and that the tier has.
      retired: whether the request at the cursor, whose last token is out, has given back what it cannot read.
      reserved: blocks that others need for their prompts.
      load_step, load_high, load_low, store_step, store_high, store_low: where each direction is free: step and bytes.
      handing: slots whose requests hand states over with the step.
      overflow: whether slots or jobs ran out.
    """

    nodes: jax.Array
    frees: jax.Array
    where: jax.Array
    marks: jax.Array
    told: jax.Array
    tables: jax.Array
    jobs: jax.Array
    lists: jax.Array
    offers: jax.Array
    arc: jax.Array
    ghosts: jax.Array
    tracker: jax.Array
    tracked: jax.Array
    idle: Scalar
    unused: Scalar
    handed_out: Scalar
    last: Scalar
    stamp: Scalar
    first_job: Scalar
    next_job: Scalar
    urgent: Scalar
    loading: Scalar
    held: Scalar
    visited: Scalar
    kept: Scalar
    aside: Scalar
    ended: Scalar
    local: Scalar
    external: Scalar
    retired: Scalar
    reserved: Scalar
    load_step: Scalar
    load_high: Scalar
    load_low: Scalar
    store_step: Scalar
    store_high: Scalar
    store_low: Scalar
    stored: Scalar
    read_once: Scalar
    loaded: Scalar
    evicted: Scalar
    refused: Scalar
    peak: Scalar
    flushed: Scalar
    waits: Scalar
    wait_steps: Scalar
    loads: Scalar
    load_steps: Scalar
    slower: Scalar
    loaded_tokens: Scalar
    load_chunks: Scalar
    lacked_0: Scalar
    lacked_1: Scalar
    lacked_2: Scalar
    lacked_3: Scalar
    handing: Scalar
    overflow: Scalar

    @property
    def room(self) -> TierRoom:
        """Static sizes."""
        return self.sizes.tier  # type: ignore[attr-defined]

    def node(self, node: Any, field: enum.IntEnum) -> Scalar:
        """Index into `nodes` of a word of a chunk, of a request's node, or of the list's ends."""
        return node * self.room.node_words + int(field)

    def user(self, request: Any) -> Scalar:
        """The node of a request."""
        return self.room.user(request)

    def request_of(self, user: Any) -> Scalar:
        """The request of a node."""
        return jnp.right_shift(user - self.room.chunks, self.room.user_rows.bit_length() - 1)

    def handed_word(self, block: Any, word: Handed) -> Scalar:
        """Index into `keys` of a word of a block."""
        return self.key(block, self.sizes.buckets.key_words - len(Handed) + int(word))

    @property
    def ends(self) -> int:
        """The node before the first of the list, and after the last."""
        return self.room.user(self.room.users)

    @property
    def ends_often(self) -> int:
        """That of ARC's second list."""
        return self.room.user(self.room.users + 1)

    @property
    def spare_node(self) -> int:
        """A node that is nobody's."""
        return self.room.user(self.room.users + 2)

    def offer(self, place: Any) -> Scalar:
        """Index into `offers` of an entry; its block follows, and of ARC its place in `marks`."""
        return place * (4 if self.room.arc else 2)

    def ghost(self, row: Any, word: GhostWord) -> Scalar:
        """Index into `ghosts` of a word of a row."""
        return row * len(GhostWord) + int(word)

    @property
    def ghost_ends(self) -> int:
        """The row before the first name of those that one request used; the next one of the others."""
        return 2 * self.room.chunks

    @property
    def ghost_spare(self) -> int:
        """A row that is nobody's."""
        return 2 * self.room.chunks + 2

    def tracker_word(self, row: Any, word: TrackerWord) -> Scalar:
        """Index into `tracker` of a word of a row."""
        return row * len(TrackerWord) + int(word)

    def slot_word(self, slot: Scalar, word: SlotWord) -> Scalar:
        """Index into `tables` of a word of a slot."""
        return slot * (SLOT_WORDS + ROW_WORDS * self.sizes.buckets.groups) + int(word)

    def told_word(self, slot: Scalar, group: Scalar, word: ToldRow) -> Scalar:
        """Index into `tables` of a word of a slot's row in a group."""
        return self.slot_word(slot, SlotWord.END) + SLOT_WORDS + group * ROW_WORDS + int(word)

    def job(self, number: Scalar, word: Job) -> Scalar:
        """Index into `jobs` of a word of a job."""
        return (number & (self.room.jobs - 1)) * JOB_WORDS + int(word)

    def ended_place(self, place: Scalar) -> Scalar:
        """Index into `lists` of a request that ended; its slot follows."""
        return self.sizes.buckets.requests + 1 + 2 * place

    def handing_place(self, place: Scalar) -> Scalar:
        """Index into `lists` of a slot whose request hands states over."""
        return self.ended_place(self.room.users + 1) + place


@dataclasses.dataclass(frozen=True)
class TierRoom:
    """Static sizes of a tier: chunks; users, one more than requests of the trace; jobs, a power of two; chunks whose
    offers are counted; whether its policy is ARC; whether the cache hands states over; and whether requests that finish
    offer the end of a window again."""

    chunks: int
    users: int
    jobs: int
    tracked: int = 0
    arc: bool = False
    states: bool = False
    again: bool = False

    @property
    def node_words(self) -> int:
        """Words of a row of `nodes`: as few as the policy takes, since chunks are come upon in any order."""
        return 8 if self.arc else 4

    @property
    def user_rows(self) -> int:
        """Rows of a request."""
        return USER_WORDS // self.node_words

    def user(self, request: Any) -> Any:
        """The node of a request, from `users` on of the ends of lists and of the spare."""
        return self.chunks + self.user_rows * request


@dataclasses.dataclass(frozen=True)
class TierView:
    """A tier's parameters.

    Attributes:
      groups: int32[groups * 11], `TierField`.
      numbers: int32[11], `TierNumber`.
      moved: int32[3 * entries], of so many chunks: steps that moving them takes, and bytes more, in two words.
      rate: int32[2], bytes of a step, in two words.
      beaten: int32[entries], of so many chunks, most tokens that would be computed again sooner.
      names: int32[requests], places of the requests' names in order.
    """

    groups: jax.Array
    numbers: jax.Array
    moved: jax.Array
    rate: jax.Array
    beaten: jax.Array
    names: jax.Array

    def group(self, group: Any, field: TierField) -> Scalar:
        """A parameter of a group."""
        return loops.read(self.groups, group * TIER_WORDS + int(field))

    def number(self, number: TierNumber) -> Scalar:
        """Another parameter."""
        return loops.read(self.numbers, jnp.int32(int(number)))

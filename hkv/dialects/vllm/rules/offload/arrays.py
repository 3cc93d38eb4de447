"""Arrays and scalars of a second tier in a workspace, and where the words of `words` stand in them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload.words import (
    JOB_WORDS,
    ROW_WORDS,
    SLOT_WORDS,
    USER_WORDS,
    GhostWord,
    Handed,
    Job,
    SlotWord,
    ToldRow,
    TrackerWord,
)
from hkv.state.loops import Scalar
from hkv.state.workspace import Workspace

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
    *("load_steps", "slower", "loaded_tokens", "load_chunks", "handing", "overflow"),
)
"""Names of the scalars, in the order in which they are kept between dispatches."""


@dataclasses.dataclass(frozen=True)
class TierArrays(Workspace):
    """A cache with the flat arrays of its second tier, a lane only.

    Attributes:
      nodes: int32[chunks * node_words + (users + 3) * 16], `ChunkNode` of chunks, `User` of requests, and as many words
        each for the ends of two lists and a spare.
      frees: int32[chunks + 1], a stack of chunks that came back.
      where: int32[(keys + 1) * groups], by key and group, 1 plus its chunk; else 0, or `GHOST` and below.
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

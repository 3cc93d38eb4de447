"""Copies between blocks of the GPU and of the simpler tier: both are held until a worker has made them.

vLLM 0.33 `SimpleCPUOffloadScheduler`.
"""

from __future__ import annotations

import typing

from reference.dialects.vllm.offload.lives import Live, Serving
from reference.dialects.vllm.offload.records import Mail
from reference.dialects.vllm.pool import release, take, touch
from reference.dialects.vllm.records import NONE, Block, Cache, Entry
from reference.language import Column, Line, Record, Ring, Settings, Table, Text, another
from reference.language.records import declared

TEXT = Text(__name__)

TierCache = another(Cache, "Tier")
"""The tier, which has the rules of the cache in front of it, and records of its own."""

TierBlock, TierEntry = (typing.get_args(declared(TierCache)[1][table])[0] for table in ("blocks", "entries"))


class Saved(Record):
    """A request that was given blocks, as far as stores go, and what was found for it.

    Attributes:
      live: the scheduler's record. known: whether stores are made of it. finished: whether it has finished.
      blocks: of each column, its block in each group as the steps told them; held: of each group, columns so far.
      cursors: of each group, the block from which on it stores. passed: blocks that the store at hand goes beyond that.
      stores: its stores that go on.
      pinned: whether the tier's rows of it are held, which begin after `local` tokens.
      load: copies that are ordered, or go on.
      refused: whether the step preempted it or it has finished.
    """

    live: Live
    known: int
    finished: int
    blocks: Line[Block]
    held: Line[int]
    cursors: Line[int]
    passed: Line[int]
    stores: int
    pinned: int
    local: int
    load: Copies
    refused: int


class Pair(Record):
    """A block of the GPU, or None for none, and one of the tier, of which one is copied to the other."""

    gpu: Block
    tier: TierBlock  # type: ignore[valid-type]
    next: Pair


class Copies(Record):
    """A job that goes on, or is collected.

    Attributes:
      number: its number, from 1 on; 0 as long as it is not ordered. writes: whether it stores.
      left: reports that are still to come, one a worker.
      abandoned: whether the tier was emptied since, so that what it stores is not kept.
      first, last: its pairs; `count` of them. owners: requests that wait for it. after: of those that are kept for the
      next step, the next one; of a vacant record, the next vacant one.
    """

    number: int
    writes: int
    left: int
    abandoned: int
    first: Pair
    last: Pair
    count: int
    owners: Owner
    after: Copies


class Owner(Record):
    """A request that waits for a job. next: the job's next one."""

    saved: Saved
    next: Owner


class Choices(Settings):
    """The configuration of the tier.

    Attributes:
      lazy: whether it stores what the GPU is about to hand out. near: blocks that a step looks at then.
      workers: workers that report each job. full: the first group of full attention, from 1 on.
      partial: whether the ends of prompts inside blocks are kept.
      lazy_walk_goes_on, lazy_store_renews: known defects, by their names.
    """

    lazy: int
    near: int
    workers: int
    full: int
    partial: int
    lazy_walk_goes_on: int
    lazy_store_renews: int


class Copying(Serving):
    """Requests, the GPU's cache, and a tier of blocks behind it.

    Attributes:
      tier: the tier. told_of: what it is told of.
      reading: of a block of the GPU, whether a store reads it. twin: of an entry of the GPU, the tier's.
      saved: the end of `loads` and `pins`, and then one of each request of the cache.
      loads: requests whose loads are ordered, in order; pins: those for which blocks are held.
      kept, kept_last: copies of requests that ended, for the next step. store: the store that a step ordered.
      vacant_copies, vacant_pair, vacant_owner: records of none; most_copies: records of copies.
      number: of the last job. flushes: whether the step waits for jobs that went on before it; `before`, the last of
      them. looked_at: the block at which a lazy walk ended.
    """

    tier: TierCache  # type: ignore[valid-type]
    told_of: Mail
    saved: Table[Saved]
    copies: Table[Copies]
    pairs: Table[Pair]
    owners: Table[Owner]
    reading: Column[Block, int]
    twin: Column[Entry, TierEntry]  # type: ignore[valid-type]
    loads: Ring[Saved]
    pins: Ring[Saved]
    choices: Choices
    kept: Copies
    kept_last: Copies
    store: Copies
    vacant_copies: Copies
    vacant_pair: Pair
    vacant_owner: Owner
    number: int
    flushes: int
    before: int
    looked_at: Block
    most_copies: int


def new_copies(s: Copying, writes: int) -> Copies:
    """Copies of nothing yet."""
    made = s.vacant_copies
    s.vacant_copies = made.after
    made.after, made.first, made.last, made.owners = NONE, NONE, NONE, NONE
    made.number, made.count, made.writes, made.abandoned = 0, 0, writes, 0
    return made


def free_copies(s: Copying, made: Copies) -> None:
    """Copies that are made, or that are not; their pairs and owners are others'."""
    drop_owners(s, made)
    if made.first is not None:
        made.last.next, s.vacant_pair = s.vacant_pair, made.first
    made.number, made.first = 0, NONE
    made.after, s.vacant_copies = s.vacant_copies, made


def drop_owners(s: Copying, made: Copies) -> None:
    """Nobody waits for copies."""
    while made.owners is not None:
        owner = made.owners
        made.owners = owner.next
        owner.next, s.vacant_owner = s.vacant_owner, owner


def add(s: Copying, made: Copies, gpu: Block, tier: TierBlock) -> None:  # type: ignore[valid-type]
    """One more pair."""
    pair = s.vacant_pair
    s.vacant_pair = pair.next
    pair.gpu, pair.tier, pair.next = gpu, tier, NONE
    if made.last is None:
        made.first = pair
    else:
        made.last.next = pair
    made.last = pair
    made.count += 1


def join(s: Copying, made: Copies, other: Copies) -> None:
    """Copies that were kept for this step come behind the others."""
    if made.last is None:
        made.first = other.first
    else:
        made.last.next = other.first
    made.last = other.last
    made.count += other.count
    other.first = NONE
    free_copies(s, other)


def hold(s: Copying, made: Copies) -> None:
    """Blocks of the tier for those of the GPU that are to be stored, both held from now on."""
    pair = made.first
    while pair is not None:
        if pair.tier is None:
            s.reading[pair.gpu] = 1
            pair.tier = take(s.tier, s.tier.groups[1])
            touch(s.cache, pair.gpu)
        pair = pair.next


def give_back(s: Copying, made: Copies) -> None:
    """Both sides of copies are held no more, and nobody waits for them."""
    let_go(s, made)
    free_copies(s, made)


def let_go(s: Copying, made: Copies) -> None:
    """Both sides of copies are held no more."""
    pair, last = made.first, s.tier.free.ends
    while pair is not None:
        last = release(s.tier, pair.tier, last)
        pair = pair.next
    other, behind = made.first, s.cache.free.ends
    while other is not None:
        if other.gpu is not None:
            behind = release(s.cache, other.gpu, behind)
        other = other.next


def own(s: Copying, made: Copies, saved: Saved) -> None:
    """A request waits for a job, which is noted once."""
    owner, known = made.owners, False
    while owner is not None:
        known = known or owner.saved is saved
        owner = owner.next
    if not known:
        new = s.vacant_owner
        s.vacant_owner = new.next
        new.saved, new.next, made.owners = saved, made.owners, new

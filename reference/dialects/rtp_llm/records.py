"""The state of RTP-LLM's cache: pools of blocks that are held in three roles, requests that hold some, and a cache of
keys in order of use, which may be a prefix tree, too.

A key is the name of a block together with everything before it; whoever drives the cache makes keys of tokens: equal
ones have the same. Block 0 of a pool is never handed out, so that 0 in a list of blocks is a hole. Lengths of requests
are in tokens, everything else is in blocks.

After RTP-LLM (main, 20 August 2026), `KVCacheAllocator`, its subclasses and groups, `BlockPool`, `SharedBlockCache`.
"""

from __future__ import annotations

import enum

from reference.language import Array, Line, Part, Record, Ring, Settings, Table, Text

TEXT = Text(__name__)


class Pool(Record):
    """A pool of blocks (`BlockPool`).

    Attributes:
      first: number of its block 0 among `Cache.blocks`. total: blocks that can be handed out.
      free: those that nobody holds. held: those that a request or a connector holds.
      bits: a tree of words of 16 bits. In the last level a bit says that a block is free, in the others that a word of
      the level below has one. leaf: place of the last level's first word.
    """

    first: int
    total: int
    free: int
    held: int
    leaf: int
    bits: Line[int]


class Block(Record):
    """A block. request, connector, cache: references of each role. settled: the operation that gave one back last."""

    request: int
    connector: int
    cache: int
    settled: int


class Group(Record):
    """A group's configuration, which rules only read (`KVCacheGroup`, `CacheGroupPolicy`).

    Attributes:
      at: its place among the groups. pool: where its blocks come from. kind: a `Kind`. block: tokens of one.
      tail: blocks at the end of a sequence that an allocation brings. kept: those that decoding keeps. checked: blocks
      at the end that must be there. grid: whether blocks on the grid may stay.
      reuse: whether its policy lets others reuse its blocks. votes: whether a hit needs its block under the last key.
      alone: whether it may lose blocks alone, under the prefix tree. explicit: whether its pool has a size of its own,
      and no part of the reserve.
      dealt: whether its blocks are dealt out to ranks one by one. canonical: whether they are cached under the keys of
      virtual blocks. compact: whether a hit takes one slot for all ranks' tokens. logical: tokens of a slot.
    """

    at: int
    pool: Pool
    kind: int
    block: int
    tail: int
    kept: int
    checked: int
    grid: int
    reuse: int
    votes: int
    alone: int
    explicit: int
    dealt: int
    canonical: int
    compact: int
    logical: int


class BlockIds(Record):
    """Blocks of a sequence in a group (`BlockIds`).

    Attributes:
      blocks: one a slot, 0 for holes. length: slots.
      before: slots before the allocation at hand; of a fork's targets, those that were handed on. fresh: of a hole, the
      allocation that filled it. given: the fork that gave its last block to another sequence; of targets,
      how many came so.
    """

    blocks: Line[int]
    length: int
    before: int
    fresh: Line[int]
    given: int


class Sequence(Record):
    """A sequence of a request (`KVCacheResource`).

    Attributes:
      groups: its blocks in each group. keys: of its whole blocks. count: keys in use; the last of them may be that of a
      partly filled block, which is not among `keys`. aligned: whether it is not.
      uses, left: new sequences that go on from it in a fork, and those of them that are not made yet.
      next: the next record that is no sequence's.
    """

    groups: Line[BlockIds]
    keys: Line[Key]
    count: int
    aligned: int
    uses: int
    left: int
    next: Sequence


class Request(Record):
    """A request (`BatchKVCacheResource`, `CompleteTokenIds`).

    Attributes:
      live: whether there is one. batch: sequences. rows: these. made: those of a fork at work.
      tokens: of each sequence. common: those that all share: all of a single one's, else whole blocks, fixed when they
      begin. reserve: tokens to come in a step beyond the next one's: drafts and one, 0 without speculation.
      whole: whole blocks, which have keys.
    """

    live: int
    batch: int
    rows: Line[Sequence]
    made: Line[Sequence]
    tokens: int
    common: int
    reserve: int
    whole: int


class Key(Record):
    """A key, and what is cached under it (`SharedBlockCache`'s item).

    Attributes:
      cached: whether anything is. blocks: one a group; 0 for none. resident: it is never evicted.
      canonical, ordinal, parent: the dependency: its namespace, place in the sequence, and the key before it there.
      names: its nodes, by namespace: of logical blocks, and of virtual ones under context parallelism.
    """

    cached: int
    blocks: Line[int]
    resident: int
    canonical: int
    ordinal: int
    parent: Key
    names: Line[Node]


class Node(Record):
    """A name of a key in the prefix tree.

    Attributes:
      key: its key. canonical: its namespace. present: whether it is in the tree. used: time of its last use.
      parent: the node it builds on, present or not; None for a root. child, before, after: a node that builds on it,
      and that one's neighbours.
      leaf: whether it is among the leaves. since: the pass of an eviction in which it became one, the latest before or
      at that time. seen, passed: walks that came by. below: the next node of a walk.
    """

    key: Key
    canonical: int
    present: int
    used: int
    parent: Node
    child: Node
    before: Node
    after: Node
    leaf: int
    since: int
    seen: int
    passed: int
    below: Node


class Operation(Record):
    """Something asked of the cache; `count` keys or numbers from `start` on belong to it.

    Attributes:
      code: a `Code`. slot: of the request, from 0 on. tokens, sequences, reserve, reuse, device_cache, resident,
      sequence, least: as the operation's log says. copy: of FORK, whether last blocks are copied. role: a `Role`.
      length: tokens of each sequence that get slots (`incr_seq_len_override`); 0 for all.
    """

    code: int
    slot: int
    tokens: int
    count: int
    start: int
    sequences: int
    reserve: int
    reuse: int
    device_cache: int
    resident: int
    copy: int
    sequence: int
    role: int
    least: int
    length: int


class Result(Record):
    """An answer.

    Attributes:
      status: a `Status`. value: of MALLOC, tokens reused; of HOLD, blocks held; of EXPORT and EVICT, blocks that left;
      of PEAK, blocks. first, count: place of the first of `Cache.told`, and how much is told: of HOLD, places of keys;
      of EXPORT, keys; of FORK, copies.
    """

    status: int
    value: int
    first: int
    count: int


class Config(Settings):
    """The configuration.

    Attributes:
      groups: how many. block: tokens between two keys. step: blocks between two that are kept for reuse. reserve:
      blocks that a first allocation leaves free. ranks: those that share a sequence, as far as the allocator minds.
      single: one full group. apart: a pool for each group. reused: tokens that a reused key stands for. adopts: whether
      new requests take over cached blocks. tree: whether eviction follows the prefix tree. slots: requests that there
      is room for. batch: sequences of one. row: slots of a sequence in a group.
    """

    groups: int
    block: int
    step: int
    reserve: int
    ranks: int
    single: int
    apart: int
    reused: int
    adopts: int
    tree: int
    slots: int
    batch: int
    row: int


class Defects(Settings):
    """Known defects that are reproduced, by the names of `hkv.dialects.rtp_llm.bugs`."""

    leak_of_backfilled_states: int
    refused_fork_keeps_freed_lists: int
    fork_forgets_alignment: int


class Cache(Part):
    """RTP-LLM's cache.

    Attributes:
      payload, numbers: keys and numbers of operations. told: numbers of answers; where those of an evicted key begin,
      `told_keys` has the key. said: how many there are, those without room included; room: for so many.
      recent: cached keys in order of use. leaves: nodes at which eviction may begin, in order of use.
      vacant: a record of no sequence. targets: blocks that wait for a fork's sequences, a list a group.
      clock, fills, passes, walks, asked: counters that name uses, allocations, passes of evictions, walks, operations.
      version: changes to the cache, less one: -1 before the first. evictions: blocks that eviction took out of the
      cache. dropped: references that were to be given back and were not there.
    """

    pools: Table[Pool]
    blocks: Table[Block]
    groups: Table[Group]
    block_ids: Table[BlockIds]
    sequences: Table[Sequence]
    requests: Table[Request]
    keys: Table[Key]
    nodes: Table[Node]
    operations: Table[Operation]
    results: Table[Result]
    payload: Array[Key]
    numbers: Array[int]
    told: Array[int]
    told_keys: Array[Key]
    recent: Ring[Key]
    leaves: Ring[Node]
    config: Config
    defects: Defects
    said: int
    room: int
    vacant: Sequence
    targets: Sequence
    clock: int
    fills: int
    passes: int
    walks: int
    asked: int
    version: int
    evictions: int
    dropped: int


class Kind(enum.IntEnum):
    """Types of group, with RTP-LLM's numbers (`CacheGroupType`)."""

    LINEAR, FULL, SWA = range(3)


class Role(enum.IntEnum):
    """Holders of a reference."""

    REQUEST, CONNECTOR, CACHE = range(3)


class Code(enum.IntEnum):
    """Operations."""

    END, REQUEST, APPEND, MALLOC, INSERT, FORK, FREE, DROP, HOLD, RELEASE, EXPORT, EVICT, PEAK = range(13)


class Status(enum.IntEnum):
    """Outcome of an operation; `PERMANENT` to `INTERNAL_ERROR` are RTP-LLM's verdicts on an allocation."""

    OK, PERMANENT, RETRYABLE, INTERNAL_ERROR, TAIL_MISSING, NO_BLOCKS, NOT_HELD, UNKNOWN, NO_SUCH_SLOT = range(9)
    NOT_EMPTY, HAS_BLOCKS, HAS_NONE, BAD_LENGTH, BAD_COUNT, NO_SUCH_SEQUENCE, ROW_FULL = range(9, 16)


def ceil(tokens: int, block: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + block - 1) // block


def current(c: Cache, request: Request) -> int:
    """Slots of the longest list of a request's first sequence, holes included; 0 means that nothing was allocated yet
    (`curBlocksNum`)."""
    most = 0
    for g in range(c.config.groups):
        most = max(most, request.rows[0].groups[g].length)
    return most

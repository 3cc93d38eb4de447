"""The state of vLLM's prefix cache: groups of layers over one pool of blocks, and the rows of requests in each.

A key names a prefix of whole hash blocks. An *entry* is a key in one group, with the blocks that hold what it names; a
block is found by its entries for as long as it is not handed out anew, in use or free. The null block is None. Lengths
are in tokens unless they say columns; column i of a row is the block of a request's tokens from `i * size` on.

After vLLM 0.33, `v1/core/kv_cache_manager.py`, `kv_cache_coordinator.py`, `single_type_kv_cache_manager.py` and
`block_pool.py`.
"""

from __future__ import annotations

import enum
from typing import Any

from reference.dialects.vllm.settings import Config, Defects
from reference.language import Array, Line, Part, Record, Ring, Table, Text

TEXT = Text(__name__)


class Group(Record):
    """Layers of one kind (`SingleTypeKVCacheManager`).

    Attributes:
      place: from 1 on. kind: a `Kind`.
      size: tokens in a block. scale: hash blocks in it. spec_size: tokens in a block of one rank.
      unit, lookback: a query at n reads nothing before `n // unit * unit - lookback` but the sinks.
      sinks: columns at a row's beginning that every query reads.
      need: blocks before a length that a window resumes behind. steps: columns between two lengths that a hit may have.
      cap: most blocks that admission counts. spare: tokens beyond the slots asked for that get blocks.
      scratch: states for drafts at the end of a row. exports: tokens, of which a state that a chunk leaves behind
      inside it is a multiple, from the chunk's start on; 0 for none.
      fine: whether hits may end inside a block. drops: whether hits give up a block (EAGLE).
      cached: whether blocks are registered and found. zeroed: whether new blocks are to be zeroed. offered: whether a
      connector is offered its states.
      leader, twin: of groups of equal spec, which are looked up together, the first, and the next one.
    """

    place: int
    kind: int
    size: int
    scale: int
    spec_size: int
    unit: int
    lookback: int
    sinks: int
    need: int
    steps: int
    cap: int
    spare: int
    scratch: int
    exports: int
    fine: int
    drops: int
    cached: int
    zeroed: int
    offered: int
    leader: Group
    twin: Group


class Block(Record):
    """A block (`KVCacheBlock`).

    Attributes:
      refs: who holds it; without any it is in the free queue.
      names: how many entries it has, where they may be several. known: its entries by the hash blocks of it that they
      cover, 0 for all of them. later, sooner: the other blocks of each in a ring, None where it is alone.
      stamp, written: so many tokens of it were written when the step `stamp` began, in which it was registered.
    """

    refs: int
    names: int
    known: Line[Entry]
    later: Line[Block]
    sooner: Line[Block]
    stamp: int
    written: int


class Entry(Record):
    """A key in a group (`BlockHashWithGroupId`, `BlockHashToBlockMap`).

    Attributes:
      first: the block that has been there for longest. fresh: step in which a state was registered.
      noted: a `Fate`. lost, taker: step in which its last block was handed out, and the group that got it; 0 and None
      if it was not since it was registered.
    """

    first: Block
    fresh: int
    noted: int
    lost: int
    taker: Group


class Row(Record):
    """The row of a request in a group (`req_to_blocks`), and what the last lookup found for one that waits.

    Attributes:
      blocks: those of its first `length` columns; the ones between the sinks and `begin` are null.
      looked: columns that were looked at for registration, or that came with a hit (`num_cached_block`); -1 for none.
      shared: 1 more than a column whose block is shared and partly filled: it is copied before it is written.
      first_found, found: columns of the hit are those from the first, and the sinks, up to the other. reach: tokens.
      grown: whether it ends in a running state and scratch. planned: the length at which the chunk leaves a state
      behind, 0 for none; planned_at: the column; begun: 1 more than the column inside which the chunk begins and which
      it leaves as it was. stands: columns not looked at yet that hold such states.
      tail, tail_block, tail_end: the state at the end of its prompt inside a block, until it is copied or offered: its
      entry, block and length; None for none.
      asked, takes, late: blocks that the last allocation was estimated to take, and takes; whether it waits for what
      this step writes.
    """

    blocks: Line[Block]
    begin: int
    length: int
    looked: int
    shared: int
    first_found: int
    found: int
    reach: int
    grown: int
    planned: int
    planned_at: int
    begun: int
    stands: Line[int]
    tail: Entry
    tail_block: Block
    tail_end: int
    asked: int
    takes: int
    late: int


class Request(Record):
    """A request.

    Attributes:
      chain: numbers of its keys, the first `keys` of them. rows: its rows, by group.
      present: whether it has arrived. running: whether it was granted blocks. reports: whether its hits are published.
      tokens: prompt and output, no drafts. prompt: those of the prompt. computed: written or being written.
      flying: of those, the ones of steps that have not come back. room: tokens that its rows have room for.
      branch: length at which others branch off; 0 for none.
      grant_step: the step in which it was granted blocks last. granted: tokens that were written before. joined:
      whether that admitted it.
      named: whether more than its tokens identifies its prefix. returned: whether it ran before.
    """

    chain: Line[int]
    rows: Line[Row]
    keys: int
    present: int
    running: int
    reports: int
    tokens: int
    prompt: int
    computed: int
    flying: int
    room: int
    branch: int
    grant_step: int
    granted: int
    joined: int
    named: int
    returned: int


class Operation(Record):
    """Something asked of the cache; `count` numbers from `start` on in the payload: keys, blocks, or rows of a hit.

    Attributes:
      code: a `Code`. slot: of the request, from 0 on. amount: of its tokens; of a lookup, one more than its limit, 0
      for none; of FORK, the slot of the new request. keep: of RESUME, tokens that stay; prompt: those of the prompt.
      new, hit, ahead, external, reserved, in_flight: as of `KVCacheManager.allocate_slots`; a hit or new tokens below
      0: all that there are. boundary: length at which others branch off; below 0: as it was.
      delay, must_fit, advances: whether registration waits for a COMMIT; the whole request must fit; the tokens count
      as computed.
      waits, others: whether the request, and some other, is scheduled, as a live scheduler says; below 0: by the blocks
      that they hold. encoder: tokens of an encoder's output. loaded: of each group, whether a load writes its blocks.
      live: of COMMIT, more tokens than are computed may come; of COPIES, references stay. reports, named: of REQUEST.
    """

    code: int
    slot: int
    amount: int
    count: int
    start: int
    keep: int
    prompt: int
    new: int
    hit: int
    ahead: int
    external: int
    reserved: int
    in_flight: int
    boundary: int
    delay: int
    must_fit: int
    advances: int
    waits: int
    others: int
    encoder: int
    loaded: Line[int]
    live: int
    reports: int
    named: int


class Result(Record):
    """An answer.

    Attributes:
      value: tokens of a hit that are found, or adopted. longer: the longest prefix that the search came to, if that is
      longer. own, lags: of a connector, what each group finds by itself; whether some group lacks the hit's end.
      first, end: by group, the columns that are told of a row, whose blocks stand in `ids` from `start` on.
      copies: how many of the last pending copies are its own.
    """

    status: int
    value: int
    longer: int
    own: Line[int]
    lags: int
    first: Line[int]
    end: Line[int]
    start: int
    copies: int


class News(Record):
    """Something that happened: a KV event, a block to zero, a state on offer. Those are read and forgotten outside.

    Attributes:
      kind: a `Told`. group, entry, block, request: of whom. start, end, size: tokens of the span of STORED, and of its
      blocks; its keys are the KEYs since the one before it.
    """

    kind: int
    group: Group
    entry: Entry
    block: Block
    request: Request
    start: int
    end: int
    size: int


class Copy(Record):
    """A copy that is to be made; both blocks are held for it. `adopted`: the row has the copy, else the cache does."""

    group: Group
    source: Block
    target: Block
    adopted: int


class Offer(Record):
    """A state that a connector is to be offered (`BoundaryStateOffload`)."""

    group: Group
    request: Request
    block: Block
    entry: Entry


class Free(Ring[Block]):
    """Blocks without references, the next to be handed out first; cached ones stay so until then
    (`FreeKVCacheBlockQueue`)."""

    count: int


class Cache(Part):
    """VLLM's cache.

    Attributes:
      entries: those of the first key for each group, then of the next. order: groups as they are asked for a hit.
      payload: keys, blocks of operations. ids: blocks of answers, the first `listed`. news: the first `told`. copies:
      those to be made, the first `pending`. offers: the first `offered`.
      free: the free queue. asker, agreed: the request whose lookup was last, and its hit, which may be adopted.
      slots: requests that there is room for. scheduled: requests that run. step: one more than the steps begun.
      evictions: blocks that lost their keys by being handed out. failed: a `Failure`.
      usable, whole, halfway: of the last refusal, free blocks that could be counted on; whether the whole request had
      to fit; whether the estimate did. refused, reserved: whose it was, and blocks that it was to leave. resets: how
      often the cache was reset. These are noted for whoever asks.
    """

    groups: Table[Group]
    blocks: Table[Block]
    entries: Table[Entry]
    rows: Table[Row]
    requests: Table[Request]
    operations: Table[Operation]
    results: Table[Result]
    news: Table[News]
    copies: Table[Copy]
    offers: Table[Offer]
    order: Array[Group]
    payload: Array[int]
    ids: Array[Block]
    free: Free
    config: Config
    defects: Defects
    listed: int
    told: int
    pending: int
    offered: int
    asker: Request
    agreed: int
    slots: int
    scheduled: int
    step: int
    evictions: int
    failed: int
    usable: int
    whole: int
    halfway: int
    refused: Request
    reserved: int
    resets: int


class Kind(enum.IntEnum):
    """Rules of a group. FULL: full attention, MLA. WINDOW: sliding windows, states that are not cached. STATE: a state
    for each column (Mamba in `align` mode). CHUNK: chunked local attention. PAIR: own and previous chunk. SINKS: sinks
    and a window. RING: one block (`opaque`). ENCODER: blocks of an encoder's output (cross attention)."""

    FULL, WINDOW, STATE, CHUNK, PAIR, SINKS, RING, ENCODER = range(8)


class Told(enum.IntEnum):
    """Kinds of news."""

    STORED, KEY, REMOVED, CLEARED, ZERO, OFFER = range(6)


class Fate(enum.IntEnum):
    """Last thing that became of an entry: registered; its block was null; it was not worth registering."""

    UNSEEN, REGISTERED, RETIRED, NOT_RETAINED = range(4)


class Failure(enum.IntEnum):
    """Cause over which a reproduced defect fails: keys that do not exist, too few blocks, a state that was given back,
    a chunk's state without a column, or beyond the keys, blocks that hash blocks do not fill."""

    NONE, KEYS, BLOCKS, TAIL, COLUMN, CHECKPOINT, SIZE = range(7)


class Code(enum.IntEnum):
    """Operations."""

    END, REQUEST, APPEND, RESUME, LOOKUP, CONNECT, FOUND, ALLOCATE, ADVANCE, COMPUTED, COMMIT, RETIRE = range(12)
    FREE, POP, DROP, FORK, STEP, EVICT, RESET, COPIES, RELEASE, HOLD, UNWRITTEN, OFFLOADS, FINALIZE = range(12, 25)


class Status(enum.IntEnum):
    """Outcome of an operation."""

    OK, UNKNOWN, NO_SUCH_SLOT, NOT_WAITING, NOT_RUNNING, BAD_LENGTH, BAD_HIT, BAD_BLOCK, NO_ROOM, IN_USE = range(10)
    ROW_FULL, FAILED = range(10, 12)


NONE: Any = None
"""No record: the null block, or nobody."""

DENSE = -1
"""No interval: everything is retained that a hit may need."""

UNBOUNDED = 1 << 29
"""More tokens than any request has, and more blocks."""


def ceil(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return (a + b - 1) // b


def passed(group: Group, tokens: int) -> int:
    """The column before which those after the sinks are null once `tokens` are computed (`get_num_skipped_tokens`)."""
    return max(group.sinks, max(0, tokens // group.unit * group.unit - group.lookback) // group.size)


def at_column(group: Group, row: Row, column: int) -> Block:
    """The block of a column; None for the null block."""
    if column >= group.sinks and column < row.begin:
        return NONE
    return row.blocks[column]

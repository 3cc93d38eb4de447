"""The state of vLLM's second tier: chunks by their keys, in the order in which they leave, requests, and their jobs.

A key is the name of a prefix and a group; whoever drives the tier makes keys of hashes: equal ones are the same. It has
a chunk while that is in the tier. Of one request a prefix of each length has one name.
vLLM 0.33 `CPUOffloadingManager`, `LRUCachePolicy`, `ARCCachePolicy`, `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

import enum

from reference.dialects.vllm.offload.keys import Idle, Key, Lists
from reference.language import NOTHING, Array, Line, Part, Record, Ring, Settings, Table, Text

TEXT = Text(__name__)


class Group(Record):
    """A group of layers.

    Attributes:
      index: its number, from 0 on. size: tokens of a block. chunk: tokens of a chunk.
      window: chunks before a length that resuming there takes; 0 for all. span: tokens before a query that a sliding
      window keeps; -1 for other groups.
      eagle: whether it has a draft's layers, whose last chunk is not settled. aligned: whether it keeps states, which
      are handed over at boundaries. proof: tokens after a tail of it whose key says that it is settled.
      block: the block of it that is handed over.
    """

    index: int
    size: int
    chunk: int
    window: int
    span: int
    eagle: int
    aligned: int
    proof: int
    block: int


class Use(Record):
    """A chunk as a request names it.

    Attributes:
      key: its key. end: tokens of the prefix that ends with it.
      seen: whether the request has used it since the tier was emptied. stored: whether it stored it. found: whether it
      found it ready and had not stored it. missed: whether it was to store it, and it was absent.
      next: the use after it in a job. blocks: those that its store reads; 0 for none.
    """

    key: Key
    end: int
    seen: int
    stored: int
    found: int
    missed: int
    next: Use
    blocks: Line[int]


class Offloaded(Record):
    """A request as the tier knows it (`RequestOffloadState`).

    Attributes:
      ends: a record that its uses begin and end with, in the order of their ends; its own is 0. near: the use that was
      entered last, or `ends`.
      number: its number among those that used anything, under LRU; 0 before it has one.
      filling: how often the tier had been emptied when its uses began; 0 before they did.
      ended: whether it has ended.
      chain: numbers of the prefixes that its hash blocks end, of which the tier knows `hashes`.
      uses: of each prefix, its use in each group. blocks: of each column, its block in each group as steps told it; 0
      for those that it has given up. held: of each group, columns so far. before: those before this step.
      cursors: of each group, the chunk from which on it offers. reach: chunks that may be stored in this step.
      prompt, tokens, computed: tokens of the prompt, of all so far, and those that are computed. shared: tokens up to
      which others were seen to share the prompt; 0 for none.
      load_limit, store_limit: tokens that may be loaded for it, and stored of it; NOTHING for all.
      local: tokens of its hit on the GPU at the last lookup. tail: end of the tail inside a block that this found,
      until it is loaded; 0 for none. tail_end: of one that is handed over. loaded: whether a load was ever ordered.
      within: the step in which it may wait for a load. scheduled: tokens of the step at hand. noted: the last step that
      told of its blocks.
      first: its jobs. known: whether the tier knows it. finished, aborted, told: whether it has finished, was aborted,
      and whether a step has told so.
    """

    ends: Use
    near: Use
    number: int
    filling: int
    ended: int
    chain: Line[int]
    hashes: int
    uses: Line[Use]
    blocks: Line[int]
    held: Line[int]
    before: Line[int]
    cursors: Line[int]
    reach: Line[int]
    prompt: int
    tokens: int
    computed: int
    shared: int
    load_limit: int
    store_limit: int
    local: int
    tail: int
    tail_end: int
    loaded: int
    within: int
    scheduled: int
    noted: int
    first: Job
    known: int
    finished: int
    aborted: int
    told: int


class Job(Record):
    """A job that goes on (`TransferJobStatus`).

    Attributes:
      number: its number. owner: its request. after: the request's next job.
      first, last: its chunks, through `Use.next`. writes: whether it stores.
      left: reports that are still to come, one a worker. ordered: the step that orders it.
      early: whether all blocks that it reads are fenced from the beginning; else those of full attention are once the
      request has finished. flushed: whether it is to be finished before the step.
      sizes, starts: of each group, blocks that it moves, and the column of the first.
    """

    number: int
    owner: Offloaded
    after: Job
    first: Use
    last: Use
    writes: int
    left: int
    ordered: int
    early: int
    flushed: int
    sizes: Line[int]
    starts: Line[int]


class Fence(Record):
    """A job that reads a block which may be handed out. next: the block's next one."""

    job: Job
    next: Fence


class Rows(Record):
    """Blocks of a request, as somebody tells of them, and of a request of a step.

    Attributes:
      request: the number of its record. start: of its blocks among those that are told, group by group; counts: of each
      group, how many. told: whether there are any blocks to tell of. whole: whether these are all of them.
      tokens: those that are scheduled. finished, preempted: whether it has, was, since the last step.
    """

    request: int
    start: int
    counts: Line[int]
    told: int
    whole: int
    tokens: int
    finished: int
    preempted: int


class Handed(Record):
    """A recurrent state that the cache hands over: of `tokens` of a request, by its number, in a block of a group."""

    request: int
    index: int
    block: int
    tokens: int


class Operation(Record):
    """Something asked of the tier.

    Attributes:
      code: a `Code`. request: its record. start, count: uses in `payload`, keys in `moving`, or records of `rows`.
      spares: of STORE and ROOM, whether nothing that the request has used leaves for it.
      prompt, tokens, computed, shared, hashes: of ARRIVE and KNOW, as `Offloaded` has them; tokens: of MATCH those of
      the hit on the GPU, of ALLOCATED those to be loaded. load_limit, store_limit: of ARRIVE.
      aborted: of FINISH. handed, targets: of STEP, records of `handed`, and blocks behind those of its rows that others
      are copied to; `handed_start`, `targets_start` where these begin. job, workers: of REPORT.
    """

    code: int
    request: int
    start: int
    count: int
    spares: int
    prompt: int
    tokens: int
    computed: int
    shared: int
    hashes: int
    load_limit: int
    store_limit: int
    aborted: int
    handed_start: int
    handed: int
    targets_start: int
    targets: int
    job: Job
    workers: int


class Result(Record):
    """An answer.

    Attributes:
      count: of STORE chunks that are to be written, `lacked` from the operation's start on, NOTHING without room; of
      ROOM those that can be had; of MATCH tokens that can be loaded, NOTHING for: later; of STEP stores; of REPORT the
      block that a job reads twice; of STEP TAIL_FAILED where vLLM's engine fails.
      beside: of MATCH, whether the load takes longer than the step.
    """

    count: int
    beside: int


class Mail(Part):
    """Things that the tier is told of.

    Attributes:
      rows: blocks of requests, the first `count` of the step at hand. given: the blocks, the first `filled`; `hashed`,
      whether each is known by a key. handing: states that are handed over.
    """

    rows: Table[Rows]
    handing: Table[Handed]
    given: Array[int]
    hashed: Array[int]
    count: int
    filled: int


class Counts(Part):
    """Figures, in chunks but for `refused`.

    Attributes:
      stored: chunks that were stored. read: of these, chunks that were loaded once at least. loaded: chunks that were
      loaded, each time. evicted: chunks that left. refused: stores that found no room. peak: most that were there.
    """

    stored: int
    read: int
    loaded: int
    evicted: int
    refused: int
    peak: int


class Config(Settings):
    """The configuration.

    Attributes:
      chunks: chunks of the tier. arc: whether the policy is ARC, not LRU. threshold: offers of a key, by any request,
      from which on it is stored; below 2 at once. tracked: keys whose offers are counted at most. tells: whether what
      happens to keys is told.
      groups: groups of layers. full: of these, those that are looked up first, of full attention. unit: tokens of a
      prefix's hash. per_chunk: blocks of a chunk. prompt_only: whether prompts alone are stored. workers: workers that
      report each job. sync_tokens: tokens that may be loaded within a step. tails: whether the end of a prompt inside a
      block is kept. proof: most of what groups need after one. states: tokens of a chunk of states, 0 without them.
      alignment: tokens to which loads end, 0 where groups of full attention differ. interval: tokens between lengths
      that retention keeps, 0 for the prompt's end alone; NOTHING where it is dense.
    """

    chunks: int
    arc: int
    threshold: int
    tracked: int
    tells: int
    groups: int
    full: int
    unit: int
    per_chunk: int
    prompt_only: int
    workers: int
    sync_tokens: int
    tails: int
    proof: int
    states: int
    alignment: int
    interval: int


class Defects(Settings):
    """Known defects that are reproduced, by the names of `hkv.dialects.vllm.offload.config.BUGS`."""

    reset_revives_window_blocks: int
    draft_drop_misses_window_tail: int
    head_ages_while_tail_loads: int
    tail_evicts_its_own_head: int
    step_beyond_the_tier_stores_nothing: int
    tail_past_the_limit: int


class Tier(Part):
    """The second tier.

    Attributes:
      known: keys that are in use, with those that begin lists.
      payload: uses that operations are about. lacked: of a store, those that are to be written. moving: keys that
      transfers were about.
      handed_out: chunks that have been handed out since the tier was emptied, the first ones. free: those that came
      back, of which the last is handed out first once all have been; `unused` of them.
      idle: chunks that no transfer reads or writes; `heap`: under LRU, in order. aside: spared ones, while
      others leave.
      lists: chunks and keys under ARC. counted: keys whose offers are tracked, the one offered longest ago first;
      `tracked` of them.
      uses: those of each request, by their ends.
      numbers: the number that LRU gave last. filling: how often the tier was begun anew. offers: of
      chunks by requests, so far.
      groups: in the order of their numbers; `order`: in that of lookups, those of full attention first.
      mail: things that it is told of.
      vacant: a record of no use, and through `next` all others, `unnamed` of them. idle_job, idle_fence: of no job, of
      no fence, likewise through `after`, `next`; `fenced` fences are there.
      last: requests that records are in use of, at most.
      number: of the next job. step: the step at hand, from 1 on. budget: tokens that may still be loaded within it.
      fresh: blocks that were handed out since the last step, `renewed` of them; `handed`: of a block, the last
      step in which it was. fences: of a block, the jobs that read it.
      flushed: numbers of jobs that are finished before the step, `flushes` of them. stores: jobs that it
      orders, `ordered` of them.
      refused: stores of steps that found no room.
      events: keys to which something happened, and `kinds` which fate, of which offer; `told` of them.
    """

    groups: Table[Group]
    keys: Table[Key]
    named: Table[Use]
    requests: Table[Offloaded]
    jobs: Table[Job]
    fence_records: Table[Fence]
    operations: Table[Operation]
    results: Table[Result]
    payload: Array[Use]
    lacked: Array[Use]
    moving: Array[Key]
    free: Array[int]
    aside: Array[Key]
    heap: Idle
    lists: Lists
    counted: Ring[Key]
    uses: Ring[Use]
    counts: Counts
    config: Config
    defects: Defects
    events: Array[Key]
    kinds: Array[int]
    known: int
    told: int
    handed_out: int
    unused: int
    idle: int
    tracked: int
    numbers: int
    filling: int
    offers: int
    order: Array[Group]
    mail: Mail
    vacant: Use
    unnamed: int
    idle_job: Job
    idle_fence: Fence
    fenced: int
    last: int
    number: int
    step: int
    budget: int
    fresh: Array[int]
    renewed: int
    handed: Array[int]
    fences: Array[Fence]
    flushed: Array[int]
    flushes: int
    stores: Array[Job]
    ordered: int
    refused: int


class Code(enum.IntEnum):
    """Operations: of the pool, and from ARRIVE on of the connector."""

    BEGIN, STORE, LOAD, USE, STORED, FAILED, LOADED, END, ROOM, CLEAR = range(10)
    ARRIVE, KNOW, MATCH, ALLOCATED, FINISH, STEP, REPORT, RESET = range(10, 18)


LISTS = 5
"""Keys that begin lists; behind them, of each prefix, come those of its groups."""

TAIL_FAILED = NOTHING + 1
"""Answer to a step with which vLLM's engine ends."""


class Event(enum.IntEnum):
    """Fate of a key: its chunk left for others, can be read now, or left as its store failed."""

    LEFT, STORED, FAILED = range(3)


FATES = 3
"""Fates of keys. What is noted of one is its fate, and `FATES` times the offer during which it came."""


def key_of(t: Tier, request: Offloaded, group: int, tokens: int) -> Key:
    """The key of a group's part of a request's prefix."""
    return t.keys[LISTS + 1 + request.chain[tokens // t.config.unit - 1] * t.config.groups + group]


def is_ready(key: Key) -> bool:
    """True for a chunk that can be read."""
    return key.chunk > 0 and key.readers >= 0


def tell(t: Tier, key: Key, kind: int) -> None:
    """Notes the fate of a key, if anybody asks."""
    if t.config.tells:
        t.events[t.told], t.kinds[t.told] = key, t.offers * FATES + kind
        t.told += 1

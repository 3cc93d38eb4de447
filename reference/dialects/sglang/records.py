"""The state of SGLang's prefix cache: a radix tree over tied pools of pages, and the requests that hold parts of it.

A key is the name of a page together with everything before it, so a key has one place in the tree, and each node is a
run of keys. Whoever drives the cache makes keys of tokens: equal ones have the same. Lengths of requests are in tokens,
everything else is in pages; a state is a page of its pool.

After SGLang 0.5.23, `unified_cache/unified_tree_core.py`, `components/`, `unified_radix_cache.py` and `allocator.py`.
"""

from __future__ import annotations

import enum

from reference.language import Array, Column, FreeList, Heap, Line, Part, Record, Ring, Settings, Table, Text

TEXT = Text(__name__)


class Key(Record):
    """A page with everything before it (`RadixKey`, cut at pages).

    Attributes:
      page: its full page; 0 if it is not in the tree. next: the key after it in its node. head: the node that begins
      with it.
    """

    page: int
    next: Key
    head: Node


class Node(Record):
    """A run of pages that somebody cached together (`UnifiedTreeNode`).

    Attributes:
      parent: the node before it; of a node that left, the one that left before it.
      first: its first key. start, end: pages before it, and with it.
      children: nodes after it; -1 of one that left.
      live: whether it has window pages; else it is a tombstone.
      state: the state after its last page; 0 for none.
      full_locks, window_locks, state_locks: requests that hold its full pages, its window pages, its state.
      mark: name of the edge at which a lock's window ends here; 0 for none.
      hits: requests that entered it, or entered it again. priority: the highest of theirs.
      made, used: times at which it was entered, and used last; a split leaves the first as it is in both parts.
    """

    parent: Node
    first: Key
    start: int
    end: int
    children: int
    live: int
    state: int
    full_locks: int
    window_locks: int
    state_locks: int
    mark: int
    hits: int
    priority: int
    made: int
    used: int


class Request(Record):
    """A request; of a tree alone, a lock.

    Attributes:
      row: its full pages. chain: its keys.
      running: whether it runs. ran: whether it has computed a token since it came.
      tokens: of prompt and output, of which `length` have pages. prompt: those of the prompt. priority: of its nodes.
      protected: so many pages are the tree's, by a lock. entered: so many it has entered. slid: of so many the window's
      pages are free, of those that are the tree's apart. branch: page at which its first insert ends; 0 for none.
      held: the node that it holds. edge: mark of its lock's window; 0 where that goes up to the root.
      window_released, state_released: whether these parts of its lock were given back.
      own: its own state; 0 before the first pass. kept_first, kept_second: two in turn that keep what it was at lengths
      it has passed. turn: which of the two is written next. tracked: length of the last of them; 0 for none since it
      was entered. tracked_before: of the other one, if it is of a token decoded since then, too.
    """

    row: Line[int]
    chain: Line[Key]
    running: int
    ran: int
    tokens: int
    length: int
    prompt: int
    priority: int
    protected: int
    entered: int
    slid: int
    branch: int
    held: Node
    edge: int
    window_released: int
    state_released: int
    own: int
    kept_first: int
    kept_second: int
    turn: int
    tracked: int
    tracked_before: int


class Operation(Record):
    """Something asked of the cache; `count` keys from `start` on in the payload.

    Attributes:
      code: a `Code`. slot: of the request, from 0 on. tokens, priority, length, track, every: as the operation's log
      says. full, window, states: tokens, and states, that are to leave. owned, slid, entered, state: of an INSERT.
      node: of LOCK.
    """

    code: int
    slot: int
    tokens: int
    count: int
    start: int
    priority: int
    length: int
    track: int
    every: int
    full: int
    window: int
    states: int


class Result(Record):
    """An answer. hit, full_hit: pages that are found, and that full attention alone would find. full, window, states:
    pages that left."""

    status: int
    hit: int
    full_hit: int
    full: int
    window: int
    states: int


class Pool(FreeList):
    """Pages of a component: a list of free ones, those that wait to be sorted in, and what the tree has of them.

    Attributes:
      waiting: pages behind the free ones, in the same ring (`need_sort`).
      idle, held: pages of the tree that nobody holds, and that somebody does (`component_evictable_size_`,
      `component_protected_size_`).
      came, left: pages that came into the tree and left it since events were taken.
      due: pages that an eviction is for. freed: that it has freed.
    """

    waiting: int
    idle: int
    held: int
    came: int
    left: int
    due: int
    freed: int


class Leaves(Heap[Node]):
    """Nodes that may leave: nothing comes after them, and nobody holds any part of them (`_is_device_leaf`).

    Attributes:
      policy: a `Policy`. rank: of a node, what its policy reads.
    """

    policy: int
    rank: Column[Node, int]

    def before(self, one: Node, other: Node) -> bool:
        """The order of eviction; of equals the one that was used longest ago goes first."""
        first, second = self.rank[one], self.rank[other]
        return first < second or (first == second and one.used < other.used)

    def put(self, node: Node) -> None:
        """Puts a node in its place, which may have changed."""
        self.rank[node] = self.ranked(node)
        at = self.place[node]
        if at == 0:
            self.count += 1
            at = self.count
        self.settle(node, at)

    def ranked(self, node: Node) -> int:
        """A number that is smaller for a node that leaves before another (`--radix-eviction-policy`)."""
        if self.policy == Policy.LRU:
            return 0
        if self.policy == Policy.MRU:
            return -node.used
        if self.policy == Policy.FIFO:
            return node.made
        if self.policy == Policy.FILO:
            return -node.made
        if self.policy == Policy.LFU:
            return node.hits
        if self.policy == Policy.SLRU:
            return node.hits >= 2
        return node.priority


class Config(Settings):
    """The configuration.

    Attributes:
      page: tokens of a page. window: tokens that a window reads; 0 without one. eagle: whether keys are bigrams, so
      that n tokens have n - 1 units. sorts: whether freed pages wait and are sorted before they are handed out. states:
      whether layers have states; tracked: whether requests keep some; most_states: most of them on a path, -1 for any
      number. alone: a tree without pools: free lists note what is given back, the window's pages by the full ones.
    """

    page: int
    window: int
    eagle: int
    sorts: int
    states: int
    tracked: int
    most_states: int
    alone: int


class Defects(Settings):
    """Known defects that are reproduced, by the names of `hkv.dialects.sglang.config.BUGS`."""

    split_touches_suffix: int
    decode_loses_page: int
    window_pressure_strands_full_slots: int


class Cache(Part):
    """SGLang's cache.

    Attributes:
      payload: keys of operations. full, swa, states: its pools. peer: of a full page, its window page; 0 for none.
      leaves: those that may leave. recent, recent_states: nodes with window pages, and with a state, in order of use.
      root: a node without pages. vacant: a record of no node. clock, inserts, marks: counters that name times and
      marks. evictions: times that a node left, or lost its window pages or its state, to make room. slots: requests
      that there is room for, in records from 2 on; the first is for what is asked without a request. row: pages of a
      request. mode: what an
      eviction counts (`Mode`). stage: what it is at (`Stage`). walked: the node that it looks at next.
    """

    keys: Table[Key]
    nodes: Table[Node]
    requests: Table[Request]
    operations: Table[Operation]
    results: Table[Result]
    payload: Array[Key]
    full: Pool
    swa: Pool
    states: Pool
    peer: Array[int]
    leaves: Leaves
    recent: Ring[Node]
    recent_states: Ring[Node]
    config: Config
    defects: Defects
    root: Node
    vacant: Node
    clock: int
    inserts: int
    marks: int
    evictions: int
    slots: int
    row: int
    mode: int
    stage: int
    walked: Node


class Policy(enum.IntEnum):
    """Orders in which leaves leave."""

    LRU, LFU, FIFO, FILO, MRU, SLRU, PRIORITY = range(7)


class Mode(enum.IntEnum):
    """Measure of what is enough of a pool: pages freed, pages that are free, or nodes that left."""

    FREED, ROOM, STEPS = range(3)


class Stage(enum.IntEnum):
    """Stage of an eviction: leaves, by their policy; window pages, and then states, by recency."""

    LEAVES, WINDOW, STATES = range(3)


class Code(enum.IntEnum):
    """Operations."""

    END, MATCH, ADMIT, EXTEND, DECODE, SLIDE, CHECKPOINT, RELEASE_WINDOW, FINISH, ABORT, EVICT, ROOM = range(12)


class Status(enum.IntEnum):
    """Outcome of an operation."""

    OK, UNKNOWN, NO_SUCH_SLOT, NOT_WAITING, BAD_LENGTH, BAD_COUNT, ROW_FULL, NOT_COMPUTED, NO_ROOM, NO_STATES = range(
        10
    )


UNBOUNDED = 1 << 29
"""More tokens than any request has."""


def ceil(tokens: int, page: int) -> int:
    """Pages that hold so many tokens."""
    return (tokens + page - 1) // page

"""Logs under SGLang's rules: header, operations and answers as typed values, and the configuration a header is.

The operations are what SGLang's scheduler does with a request: it comes and takes the prefix that is cached (`admit`),
its chunks get slots (`extend`) and are entered (`checkpoint`), tokens are decoded one by one (`decode`) while the
window slides (`slide`), and at its end all is entered (`finish`) or nothing is (`abort`). Blocks are pages here: a pool
of N blocks has pages 1 to N, and a slot is a page's number times its tokens, and the place in it.
"""

from __future__ import annotations

import msgspec

from hkv.contract.log import LogFormat, PlainOperation, PooledHeader
from hkv.dialects.sglang.config import SGLangConfig
from hkv.errors import ConfigError

NAME = "sglang-0.5.23"
"""The dialect's name in headers."""

FULL_ATTENTION, SLIDING_WINDOW, STATES = KINDS = ("full_attention", "sliding_window", "mamba")
"""Kinds of groups: FULL, SWA and MAMBA as SGLang's components are called."""


class Header(PooledHeader, kw_only=True):
    """The first line: pages of each pool, the groups that have them, and SGLang's options.

    Attributes:
      policy: `--radix-eviction-policy`.
      eagle: whether keys are bigrams.
      need_sort: whether freed pages are sorted before they are handed out again.
      tracked: whether requests keep states of lengths that they have passed.
      most_states: most states on a path; -1 for any number.
      tree: whether the log is of the tree alone, and slots come with what is entered.
    """

    policy: str = "lru"
    eagle: bool = False
    need_sort: bool = False
    tracked: bool = False
    most_states: int = -1
    tree: bool = False


class Found(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `match` and `admit`: tokens of the hit, tokens that full attention alone would have found, and the full
    slots of the hit."""

    hit: int
    full: int
    slots: list[int]


class Slots(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `extend` and `decode`: the new tokens' full slots; None when refused."""

    slots: list[int] | None


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `checkpoint`: the request's full slots, of which the first `protected` are the tree's now."""

    slots: list[int]
    protected: int


class Freed(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `evict`: tokens freed in each pool, and states."""

    tokens: list[int]


class TreeNode(msgspec.Struct, forbid_unknown_fields=True):
    """A node of the tree.

    Attributes:
      parent: number of the node before it, counted in the order of the list; -1 for the root, which is not in it.
      namespace: adapter and salt of its keys.
      tokens: its tokens; under EAGLE the one after the last, too.
      slots: full slots; none for a node that lost them, which none may.
      window: window slots, None for a tombstone.
      state: the state after its last token, or None.
      locks: requests that hold its full slots, its window slots and its state, as far as there are such.
      mark: whether somebody's window was seen to end here.
      hits: number of requests that entered it.
      priority: the highest of theirs.
      used: its place among all nodes by last use, from 0 for the one unused longest.
      made: its place by age; parts of what was one node share it.
    """

    parent: int
    namespace: tuple[str | None, str | None]
    tokens: list[int]
    slots: list[int]
    window: list[int] | None
    state: int | None
    locks: list[int]
    mark: bool
    hits: int
    priority: int
    used: int
    made: int


class Pool(msgspec.Struct, forbid_unknown_fields=True):
    """Free pages of a pool in the order in which they are handed out, and those that wait to be sorted in."""

    free: list[int]
    waiting: list[int]


class Owned(msgspec.Struct, forbid_unknown_fields=True):
    """Slots of a request: full slots, how many of the first are the tree's, how many it has entered, and of how many
    it has freed the window's slots; its own state, and those that keep what it was, and of which length."""

    slots: list[int]
    protected: int
    entered: int
    slid: int
    states: list[int]
    tracked: int | None


class Ledger(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens, or states, that the tree has of a component: those that nobody holds, and those that somebody does
    (`component_evictable_size`, `component_protected_size`)."""

    evictable: int
    protected: int


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `state`.

    Attributes:
      pools: one a group.
      window: the window slot of each full slot that has one, as pairs, ascending.
      requests: those that run, by name.
      nodes: of the tree, in the order of a walk in which children come by their first tokens; None where an engine
        does not show its tree.
      recent: numbers of the nodes that have window slots, and of those that have states, as far as there are such,
        most recently used first; None likewise.
      ledgers: one a group; None in logs that were recorded before there were any.
    """

    pools: list[Pool]
    window: list[tuple[int, int]]
    requests: dict[str, Owned]
    nodes: list[TreeNode] | None
    recent: list[list[int]] | None
    ledgers: list[Ledger] | None = None


class Operation(PlainOperation, omit_defaults=True):
    """One operation."""


class Keyed(Operation, kw_only=True):
    """An operation that brings tokens, under an adapter's name and a salt that they are cached apart by."""

    tokens: list[int]
    adapter: str | None = None
    salt: str | None = None

    @property
    def namespace(self) -> tuple[str | None, str | None]:
        """Both."""
        return self.adapter, self.salt


class MatchOp(Keyed, tag="match"):
    """It is asked how much of some tokens is cached, which counts as a use of it.

    Attributes:
      node: of a tree alone, name by which later operations call the node that the answer ends at.
    """

    node: int | None = None
    want: Found | None = None


class AdmitOp(Keyed, tag="admit"):
    """A request comes and takes what is cached of its tokens but the last."""

    id: str
    priority: int = 0
    want: Found | None = None


class ExtendOp(Operation, tag="extend"):
    """A request's tokens up to a length get slots; with `track`, the state after so many of them is kept."""

    id: str
    length: int
    track: int = 0
    want: Slots | None = None


class DecodeOp(Operation, tag="decode"):
    """A request has one more token, unless it is refused a slot for it; with `track`, the state after it is kept."""

    id: str
    token: int
    track: bool = False
    want: Slots | None = None


class SlideOp(Operation, tag="slide"):
    """The window slots that a decoding request reads no more are freed, once there are at least `every`."""

    id: str
    every: int = 1


class CheckpointOp(Operation, tag="checkpoint"):
    """Everything that a running request has computed is entered."""

    id: str
    want: Row | None = None


class ReleaseWindowOp(Operation, tag="release_window"):
    """A request has decoded past its prefix: its lock on the window's part is given back."""

    id: str


class FinishOp(Operation, tag="finish"):
    """A request ends; what it has computed is entered, of it `length` tokens where a pass ran beyond its end."""

    id: str
    length: int = 0


class AbortOp(Operation, tag="abort"):
    """A request ends, and nothing is entered."""

    id: str


class EvictOp(Operation, tag="evict"):
    """At least so many tokens are freed, in each pool, and states; whole nodes at a time."""

    tokens: list[int]
    want: Freed | None = None


class StateOp(Operation, tag="state"):
    """Everything."""

    want: State | None = None


class Told(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `events`: pages, and states, that came and that left, of each group."""

    stored: list[int]
    removed: list[int]


class Room(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `room`: tokens of each pool that are free, and that nobody holds; of states likewise."""

    available: list[int]
    evictable: list[int]


class RoomOp(Operation, tag="room"):
    """Evicts until so many tokens are free in each pool, or as many as may be."""

    tokens: int
    want: Room | None = None


class EventsOp(Operation, tag="events"):
    """Those who follow the cache's events are told what came and what left since the last time."""

    want: Told | None = None


# Operations on a tree alone, whose pools are somebody else's: what SGLang's cache asks of its core.


class Gone(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `leave`: full slots that are given back, full slots whose window's are, and states."""

    full: list[int]
    window: list[int]
    states: list[int]


class Entered(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `insert`: units that the tree had, whether it took the state, and what it gives back."""

    known: int
    took: bool
    gone: Gone


class Held(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `lock`: whether the window's part ends before the root."""

    marked: bool


class InsertOp(Keyed, tag="insert", kw_only=True):
    """Tokens are entered (`InsertParams`).

    Attributes:
      node: name by which later operations call the node that they end at.
      slots: full slots, one a unit.
      window: the window slots that these are mapped to, 0 for none; empty where there is no window.
      owned: so many slots are the tree's already.
      evicted: of so many, the window's slots have been freed.
      counted: so many units this request has entered before.
      priority: of the request.
      state: the state after the last token, if layers have states.
    """

    node: int
    slots: list[int]
    window: list[int] = msgspec.field(default_factory=list[int])
    owned: int = 0
    evicted: int = 0
    counted: int = 0
    priority: int = 0
    state: int | None = None
    want: Entered | None = None


class LockOp(Operation, tag="lock"):
    """A node and what is before it are held, until the lock of that name is undone."""

    id: str
    node: int
    want: Held | None = None


class UnlockOp(Operation, tag="unlock"):
    """A lock is undone."""

    id: str


class ReleaseStateOp(Operation, tag="release_state"):
    """A lock's part on the state is given back alone."""

    id: str


class LeaveOp(Operation, tag="leave"):
    """So many nodes leave, or lose what is cached for one of `KINDS`, for the sake of that kind."""

    kind: str
    steps: int
    want: Gone | None = None


class ResetOp(Operation, tag="reset"):
    """The tree forgets everything."""


class EndedOp(Operation, tag="ended"):
    """The tree was asked for more than a log has words for; it went on, and the log ends."""

    reason: str


OPERATIONS = (
    *(MatchOp, AdmitOp, ExtendOp, DecodeOp, SlideOp, CheckpointOp),
    *(ReleaseWindowOp, FinishOp, AbortOp, EvictOp, StateOp, EventsOp, RoomOp),
)
"""The operations."""

OF_TREES = (
    *(MatchOp, InsertOp, LockOp, UnlockOp, ReleaseWindowOp, ReleaseStateOp),
    *(LeaveOp, ResetOp, EndedOp, StateOp),
)
"""Those on a tree alone."""


def to_config(header: Header) -> SGLangConfig:
    """The configuration that a header describes.

    Raises:
      ConfigError: another version of the log format, or a cache that SGLang does not have.
    """
    if header.oplog != 2:
        raise ConfigError("oplog", header.oplog, "version 2 of the log format")
    kinds = [group.get("kind") for group in header.groups]
    if kinds[:1] != [FULL_ATTENTION] or kinds != [kind for kind in KINDS if kind in kinds]:
        raise ConfigError("groups", header.groups, "full attention, and after it a sliding window, mamba, or both")
    sizes = {group.get("block_size") for group in header.groups}
    size = header.groups[0].get("block_size")
    if len(sizes) != 1 or type(size) is not int or size < 1:
        raise ConfigError("groups", header.groups, "pages of one size, of 1 token at least")
    if len(header.num_blocks) != len(kinds):
        raise ConfigError("num_blocks", header.num_blocks, f"pages of {len(kinds)} pools")
    counts = dict(zip(kinds, header.num_blocks, strict=True))
    windows = [group.get("window") for group in header.groups if group["kind"] == SLIDING_WINDOW]
    if any(type(window) is not int for window in windows):
        raise ConfigError("groups", header.groups, "a window in tokens of the sliding window")
    return SGLangConfig(
        page_size=size,
        num_slots=tuple(size * count for kind, count in counts.items() if kind != STATES),
        window=windows[0] if windows else None,
        states=counts.get(STATES),
        tracked=header.tracked,
        most_states=header.most_states,
        policy=header.policy,
        eagle=header.eagle,
        need_sort=header.need_sort,
        bugs=frozenset(header.bugs),
    )


ALL = tuple(dict.fromkeys(OPERATIONS + OF_TREES))

FORMAT = LogFormat(Header, ALL, to_config, {"parent": -1, "most_states": -1}, "sglang_")
"""Header and operations, by name."""

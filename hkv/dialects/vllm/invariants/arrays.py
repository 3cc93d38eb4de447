"""Invariants that are declared once, over arrays: NumPy's for logs and engines, JAX's for the explorer.

Such an invariant is a generator over an `ArrayMoment`. It yields masks, true where something is wrong, each with the
sentence about one place of it. Logs and engines ask `HostMoment` and say the sentence of the first true place; the
explorer (`hkv.dialects.vllm.explorer.judges`) traces the same function, takes only the masks, and stays compiled.
What the two forms do differently is in the moments: gathers and scatters, which dense comparisons stand for where
thousands of worlds are judged side by side; names of prefixes; and hits by definition, which JAX reads off tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hkv.contract.invariant import EVERY, Unknown
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import INVARIANTS, Moment, Snapshot
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import copies_states
from hkv.dialects.vllm.traffic.hit_causes import Cause, causes
from reference.hits import hit_alignment, longest_hit_by_definition

FAR = 1 << 20
"""More tokens than any request has."""

Wrong = tuple[Any, Callable[..., str]]
"""A mask, true where something is wrong, and the sentence about the place of given indices."""


class Declared(NamedTuple):
    """An invariant over arrays, and the operations after which it holds."""

    find: Callable[[Any], Iterable[Wrong]]
    after: tuple[type, ...]


DECLARED: dict[str, Declared] = {}
"""Every invariant that is declared over arrays, by name."""


def array_invariant(
    name: str, *promises: str, after: tuple[type, ...] = EVERY, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Any], Iterable[Wrong]]], Callable[[Any], Iterable[Wrong]]]:
    """Enters an invariant over arrays into `DECLARED`, and, as a check of logs and engines, into `INVARIANTS`."""

    def enter(find: Callable[[Any], Iterable[Wrong]]) -> Callable[[Any], Iterable[Wrong]]:
        @functools.wraps(find)
        def check(moment: Moment) -> Iterator[str]:
            return sentences(find(HostMoment.of(moment)))

        DECLARED[name] = Declared(find, after)
        INVARIANTS.invariant(name, *promises, after=after, needs=needs)(check)
        return find

    return enter


def sentences(found: Iterable[Wrong]) -> Iterator[str]:
    """A sentence for each mask that is true anywhere, about the first place."""
    for wrong, say in found:
        places = np.argwhere(wrong)
        if len(places):
            yield say(*places[0].tolist())


class Groups:
    """Properties of each group's spec, by their names in `LayerSpec`, as arrays of an entry a group.

    Args:
      config: the configuration.

    Attributes:
      sizes: int32[G], tokens in a block.
      apart: bool[G], states may be of other lengths than their columns' ends: exported, or kept inside blocks.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._specs, self.sizes = config.topology.specs, np.array(config.block_sizes, np.int32)
        self.apart = self.snapshot & ((self.sizes > config.hash_block_size) | (self.checkpoint_blocks > 0))

    def __getattr__(self, name: str) -> np.ndarray:
        value = np.array([getattr(spec, name) for spec in self._specs])
        setattr(self, name, value)
        return value


groups_of = functools.lru_cache(maxsize=256)(Groups)


@functools.lru_cache(maxsize=4096)
def outgrown(config: VllmConfig, tokens: int, width: int, kept: bool = True) -> np.ndarray:
    """bool[G, W]: columns that nothing reads any more when so many tokens are processed.

    Args:
      config: the groups.
      tokens: processed tokens.
      width: columns.
      kept: False to count columns that stay though they are not read (`LayerSpec.kept_beyond`).
    """
    columns, rows = np.arange(width), []
    for spec, size in zip(config.topology.specs, config.block_sizes, strict=True):
        gone = (spec if kept or not spec.kept_beyond else spec.keeping(0)).retired(tokens, size)
        rows.append((gone.start <= columns) & (columns < gone.stop))
    return np.array(rows)


@functools.lru_cache(maxsize=4096)
def read(config: VllmConfig, hit: int, width: int) -> np.ndarray:
    """bool[G, W]: columns that a query at a hit of so many tokens reads, in groups whose chunks start at blocks."""
    table = np.zeros((len(config.topology.specs), width), bool)
    for group, (spec, size) in enumerate(zip(config.topology.specs, config.block_sizes, strict=True)):
        if spec.prefix_cacheable and not spec.off_grid:
            table[group, list({position // size for positions in spec.reads(hit) for position in positions})] = True
    return table


def registrable(config: VllmConfig, group: int, tokens: int) -> int:
    """Number of the first `tokens` tokens that may get keys in a group."""
    settled = max(0, tokens - max(0, config.prefill_lookahead - 1))
    if len(config.topology.groups) == 1:
        return settled
    drafts = {config.topology.groups[index].spec for index in config.eagle_group_ids}
    unit = 1 if config.partial_hits else config.scheduler_block_size
    if config.topology.groups[group].spec in drafts and tokens >= unit:
        return min(settled, settled // unit * unit + config.block_size(group))
    return tokens // unit * unit


class ArrayMoment:
    """One operation with the cache before and after it, as arrays. There are B blocks, R requests, G groups, W columns.

    Each form says the attributes and methods below for its namespace; counts are tokens.

    Attributes:
      xp: the array namespace.
      config: the cache's configuration.
      before, after: pictures of the cache. `queued` and `refs` int[B], times in the queue, references; `place` int[B],
        blocks before it in the queue; `free` and `num_free`, blocks in the queue, and as the engine counts them;
        `entry` int[B], a number for group, tokens and key of a cached block, 0 for none, whose `group` and `tokens` are
        int[B] too; `cached` bool[B]; `rows` int[R, G, W], 0 where null or beyond the row's `lengths` int[R, G].
      granted: nothing was refused.
      slot: int, place of the operation's request.
      adopted, external, new, reserved, delay, must_fit: of an `allocate`.
      hit, found, covered: of a `lookup`, its tokens, blocks int[G, W], and the columns of each group.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def groups(self) -> Groups:
        """See `Groups`."""
        return groups_of(self.config)

    def columns(self, picture: Any) -> np.ndarray:
        """int[W]."""
        return np.arange(picture.rows.shape[-1])

    @property
    def real(self) -> np.ndarray:
        """bool[B], all blocks but the null block."""
        return np.arange(self.config.num_blocks) > 0

    def others_changed(self) -> Any:
        """True if a row changed that is not the operation's request's."""
        others = np.arange(self.after.lengths.shape[0]) != self.slot
        moved = self.xp.any((self.before.lengths != self.after.lengths) & others[:, None])
        return moved | self.xp.any((self.before.rows != self.after.rows) & others[:, None, None])

    def spare(self, picture: Any) -> Any:
        """int[B], references besides those from rows, and those held: those of pending copies."""
        return picture.refs - self.places(picture.rows) - picture.held

    @property
    def set_aside(self) -> Any:
        """Blocks that stay free when a waiting request is admitted while others run."""
        return self.xp.where(self.busy & self.waits, self.config.watermark_blocks, 0)

    def differ(self, cells: Any, values: Any, chosen: Any) -> Any:
        """bool[B]: blocks in whose chosen cells different values stand."""
        cells = self.xp.where(chosen, cells, 0)
        return self.real & (self.places(cells) > 1) & (self.most(cells, values) != -self.most(cells, -values))

    def blocks_for(self, tokens: Any) -> Any:
        """int[G], blocks that so many tokens take."""
        return -(-tokens // self.groups.sizes)


class HostPicture:
    """A snapshot as arrays, of as many requests and columns as the moment has; `ArrayMoment` says what they are."""

    def __init__(self, snapshot: Snapshot, moment: HostMoment) -> None:
        blocks, ids = moment.config.num_blocks, moment.ids
        table = np.zeros((6, blocks), int)
        self.place, self.refs, self.held, self.entry, self.group, self.tokens = table
        self.place[:], self.group[:] = FAR, -1
        self.place[snapshot.free[::-1]] = np.arange(len(snapshot.free))[::-1]
        for counts, into in ((snapshot.refs, self.refs), (snapshot.held, self.held)):
            into[list(counts)] = list(counts.values())
        for block, entry in snapshot.cached.items():
            table[3:, block] = moment.entries.setdefault(entry, len(moment.entries) + 1), *entry[:2]
        self.rows = np.zeros((len(ids), len(moment.config.block_sizes), moment.width), int)
        self.lengths = np.zeros(self.rows.shape[:2], int)
        for id, groups in snapshot.rows.items():
            for number, row in enumerate(groups):
                self.rows[ids[id], number, : len(row)], self.lengths[ids[id], number] = row, len(row)
        self.queued = np.bincount(np.array(snapshot.free, int), minlength=blocks)
        self.snapshot, self.cached, self.free = snapshot, self.entry > 0, np.asarray(len(snapshot.free))
        self.num_free = self.free if snapshot.num_free is None else np.asarray(snapshot.num_free)


class HostMoment(ArrayMoment):
    """A moment of a log or an engine in NumPy.

    Args:
      moment: the moment.
    """

    xp = np

    @staticmethod
    def of(moment: Moment) -> HostMoment:
        """The arrays of a moment, which all invariants share."""
        return vars(moment).get("arrays") or vars(moment).setdefault("arrays", HostMoment(moment))

    def __init__(self, moment: Moment) -> None:
        self.moment, self.config = moment, moment.config
        self.operation, self.answer = operation, answer = moment.operation, moment.answer
        self.entries: dict[tuple[int, int, str], int] = {}
        # A log need not say both states: what asks for one that it does not say is not judged (`UnknownError`).
        known = [each.rows for each in (moment.before, moment.after) if not isinstance(each, Unknown)]
        self.names = list(dict.fromkeys([*moment.ledger.requests, *(id for rows in known for id in rows)]))
        self.ids = {id: place for place, id in enumerate(self.names)}
        self.id: str = getattr(operation, "id", "")
        self.slot = self.ids.get(self.id, -1)
        self.copies_states = copies_states(moment.config)
        allocates = isinstance(operation, oplog.AllocateOp)
        self.total = np.asarray(moment.ledger.total(operation) if allocates else 0)
        self.asked = np.asarray(moment.ledger.slots(operation) if allocates else 0)
        refused = isinstance(answer, oplog.Allocation) and answer.blocks is None
        self.granted = np.bool_(not refused and getattr(answer, "ok", True))
        hit = answer if isinstance(answer, oplog.Hit) else oplog.Hit(0, [], 0)
        self.hit, self.shared_prefix = np.asarray(hit.hit), np.asarray(hit.shared_prefix or 0)
        self.diverged = isinstance(answer, oplog.ConnectorHit) and answer.diverged
        self.answers_anew = np.bool_(moment.again not in (None, answer))
        lengths = [len(row) for rows in [*known, {"": hit.blocks}] for groups in rows.values() for row in groups]
        tokens = max(min(hit.hit, self.config.max_model_len), int(self.asked))
        self.width = max([1, *lengths, -(-tokens // min(self.config.block_sizes))])
        self.found, self.covered = self.padded(hit.blocks)

    def __getattr__(self, name: str) -> np.ndarray:
        """An argument of the operation; 0 where it has none."""
        if name.startswith("_"):
            raise AttributeError(name)
        return np.asarray(getattr(self.operation, {"adopted": "hit", "settled": "tokens"}.get(name, name), 0) or 0)

    @functools.cached_property
    def before(self) -> HostPicture:
        return HostPicture(self.moment.before, self)

    @functools.cached_property
    def after(self) -> HostPicture:
        return HostPicture(self.moment.after, self)

    def padded(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """int[G, W] and int[G]: rows of each group with zeros beyond, and their columns."""
        table = np.zeros((len(self.config.block_sizes), max([self.width, *map(len, rows)])), int)
        for group, row in enumerate(rows):
            table[group, : len(row)] = row
        return table, np.array([*map(len, rows), *[0] * (len(table) - len(rows))])

    def does(self, *operations: type) -> np.bool_:
        return np.bool_(isinstance(self.operation, operations))

    may = does

    def mine(self, values: np.ndarray) -> np.ndarray:
        return values[self.slot] if self.slot >= 0 else np.zeros(values.shape[1:], values.dtype)

    def fact(self, name: str) -> np.ndarray:
        record = self.moment.ledger.requests[self.id]
        return np.asarray(len(record.tokens) if name == "length" else getattr(record, name))

    def take(self, values: np.ndarray, cells: np.ndarray) -> np.ndarray:
        return values[cells]

    def places(self, cells: np.ndarray) -> np.ndarray:
        return np.bincount(cells.ravel(), minlength=self.config.num_blocks) * self.real

    def most(self, cells: np.ndarray, values: np.ndarray) -> np.ndarray:
        table = np.full(self.config.num_blocks, -FAR)
        np.maximum.at(table, cells.ravel(), np.broadcast_to(values, cells.shape).ravel())
        return table

    def rank(self, values: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.sort(values), values)

    def among(self, values: np.ndarray, others: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.isin(values, others[chosen])

    def outgrown(self, tokens: Any, width: int, kept: bool = True) -> np.ndarray:
        return outgrown(self.config, int(tokens), width, kept)

    def read(self, hit: Any) -> np.ndarray:
        return read(self.config, int(hit), self.width)

    def registrable(self, tokens: Any) -> np.ndarray:
        return np.array([registrable(self.config, group, int(tokens)) for group in range(len(self.groups.sizes))])

    def prefixes(self, ends: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        names = np.full(chosen.shape, -1)
        for place in zip(*chosen.nonzero(), strict=True):
            name = self.moment.ledger.prefix(self.names[place[0]], int(ends[place]))
            names[place] = -1 if name is None else name
        return names

    def _meant(self, block: int) -> set[int]:
        """Prefixes that the key of a cached block stands for."""
        return self.moment.book.prefixes.get(self.moment.after.cached[block][2], set())

    def owned(self, chosen: np.ndarray) -> np.ndarray:
        cells, right = self.after.rows, chosen.copy()
        names = self.prefixes(self.after.tokens[cells], chosen)
        for place in zip(*chosen.nonzero(), strict=True):
            right[place] = names[place] in self._meant(int(cells[place]))
        return right

    def continues(self, cells: np.ndarray, ends: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        ledger, right = self.moment.ledger, np.zeros(cells.shape, bool)
        for place in zip(*chosen.nonzero(), strict=True):
            end = int(ends[place])
            right[place] = ledger.prefix(self.id, end) in {
                ledger.cut(name, end) for name in self._meant(int(cells[place]))
            }
        return right

    def _lengths(self, block: int) -> set[int]:
        return {self.moment.ledger.length(name) for name in self._meant(block)}

    @property
    def named(self) -> np.ndarray:
        known = np.zeros(self.config.num_blocks, bool)
        for block, (_, tokens, _) in self.moment.after.cached.items():
            known[block] = tokens in self._lengths(block)
        return known

    def unnamed(self, block: int) -> str:
        """Sentence about a block whose key is of no prefix of as many tokens."""
        group, tokens, key = self.moment.after.cached[block]
        known = ", ".join(map(str, sorted(self._lengths(block))))
        said = f"stands for {known}" if known else "is of no prefix that a request ever had"
        return f"block {block} is cached as {tokens} tokens of group {group} under key {key}, which {said}"

    @property
    def waiting(self) -> np.bool_:
        return np.bool_(self.id not in self.moment.before.rows)

    @property
    def busy(self) -> np.bool_:
        said, rows = getattr(self.operation, "scheduled", None), self.moment.before.rows
        return np.bool_(any(rows[id] for id in rows if id != self.id) if said is None else said)

    @property
    def waits(self) -> np.bool_:
        said = getattr(self.operation, "waiting", None)
        return self.waiting if said is None else np.bool_(said)

    def same(self) -> np.bool_:
        return np.bool_(self.moment.before == self.moment.after)

    @property
    def searched(self) -> int:
        """One more than the most tokens of the hit: those of the request, or as the lookup says."""
        limit = getattr(self.operation, "limit", None)
        return int(self.fact("length")) if limit is None else limit + 1

    def excused(self, direction: str) -> np.bool_:
        named, limited = causes(self.config, self.searched), getattr(self.operation, "limit", None) is not None
        if direction == "less":
            limited = limited and bool(self.config.eagle_group_ids)
            return np.bool_(limited or any(cause.direction == "less" for cause in named))
        return np.bool_(self.config.partial_hits or named & {Cause.DROP_NOT_REPEATED, Cause.CHUNK_OFF_GRID})

    @functools.cached_property
    def defined(self) -> np.ndarray:
        has = functools.partial(self.moment.has_entry, self.id)
        return np.asarray(longest_hit_by_definition(self.config, has, self.searched))

    @property
    def may_be_hit(self) -> np.bool_:
        """True if the hit is aligned, and leaves the request's last token to compute."""
        return np.bool_(0 <= self.hit < self.fact("length") and self.hit % hit_alignment(self.config) == 0)

    @property
    def told(self) -> np.ndarray | None:
        """int[B]: how often each block is an end of the copies that are told; None where nothing is."""
        ends = np.array(self.answer, int).ravel() if isinstance(self.answer, list) else None
        return None if ends is None else np.bincount(ends, minlength=self.config.num_blocks)

    @property
    def evicted(self) -> np.ndarray:
        return np.isin(np.arange(self.config.num_blocks), self.operation.blocks)  # type: ignore[union-attr]

    @property
    def came(self) -> str:
        """That the request was preempted before, as a phrase."""
        preempted = self.moment.ledger.requests[self.id].preempted
        return f" of {self.id}, which was preempted and has come back," if preempted else ""

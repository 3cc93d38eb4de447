"""Invariants that are declared once, over arrays: NumPy's for logs and engines, JAX's for the explorer.

Such an invariant is a generator over an `ArrayMoment`. It yields masks, true where something is wrong, each with the
sentence about one place of it. Logs and engines ask `HostMoment` and say the sentence of the first true place; the
explorer (`hkv.dialects.vllm.explorer.judges`) traces the same function, takes only the masks, and stays compiled.
What the two forms do differently is in the moments: gathers and scatters, which dense comparisons stand for where
thousands of worlds are judged side by side; names of prefixes; and hits by definition, which JAX reads off tables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import INVARIANTS, Moment, Snapshot
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import copies_states
from hkv.dialects.vllm.traffic.hit_causes import Cause, causes
from hkv.oracle.invariant import EVERY, Unknown
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


class Groups(NamedTuple):
    """Properties of a configuration's groups, an entry a group: bool[G], or int32[G] for counts.

    Attributes:
      sizes: tokens in a block.
      one_block: a row is one block.
      encoder: a row holds an encoder's output.
      keeps_states: states stand at the ends of blocks.
      scratch: columns besides those of tokens.
      snapshot: blocks hold states.
      off_grid: chunks do not start at blocks.
      reads_all: every query reads all.
      cacheable: blocks may be hit.
      apart: states may be of other lengths than their columns' ends: exported, or kept inside blocks.
      checkpoints: chunks export states on their way, each in a column that says nothing of its length.
    """

    sizes: np.ndarray
    one_block: np.ndarray
    encoder: np.ndarray
    keeps_states: np.ndarray
    scratch: np.ndarray
    snapshot: np.ndarray
    off_grid: np.ndarray
    reads_all: np.ndarray
    cacheable: np.ndarray
    apart: np.ndarray
    checkpoints: np.ndarray


@functools.lru_cache(maxsize=256)
def groups_of(config: VllmConfig) -> Groups:
    """The groups of a configuration, see `Groups`."""
    specs, sizes = config.topology.specs, np.array(config.block_sizes, np.int32)
    snapshot, checkpoints = (
        np.array([spec.snapshot for spec in specs]),
        np.array([spec.checkpoint_blocks > 0 for spec in specs]),
    )
    return Groups(
        sizes=sizes,
        one_block=np.array([spec.one_block for spec in specs]),
        encoder=np.array([bool(spec.encoder_tokens) for spec in specs]),
        keeps_states=np.array([bool(spec.keeps_states) for spec in specs]),
        scratch=np.array([spec.scratch_blocks for spec in specs], np.int32),
        snapshot=snapshot,
        off_grid=np.array([spec.off_grid for spec in specs]),
        reads_all=np.array([spec.reads_all for spec in specs]),
        cacheable=np.array([spec.prefix_cacheable for spec in specs]),
        apart=snapshot & ((sizes > config.hash_block_size) | checkpoints),
        checkpoints=checkpoints,
    )


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
      adopted, external, new, reserved: of an `allocate`; `delay`, `must_fit`, `counted` likewise.
      hit, found, covered: of a `lookup`, its tokens, blocks int[G, W], and the columns of each group.
    """

    xp: Any
    config: VllmConfig
    before: Any
    after: Any

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


@dataclasses.dataclass(frozen=True)
class HostPicture:
    """A snapshot as arrays; `ArrayMoment` says what they are."""

    snapshot: Snapshot
    queued: np.ndarray
    place: np.ndarray
    refs: np.ndarray
    held: np.ndarray
    entry: np.ndarray
    group: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray
    free: np.ndarray
    num_free: np.ndarray

    @property
    def cached(self) -> np.ndarray:
        """bool[B], blocks with a key."""
        return self.entry > 0


def host_picture(snapshot: Snapshot, moment: HostMoment) -> HostPicture:
    """A snapshot as arrays of as many requests and columns as the moment has."""
    blocks, ids = moment.config.num_blocks, moment.ids
    table = np.zeros((6, blocks), int)
    place, refs, held, _, group, _ = table
    place[:], group[:] = FAR, -1
    place[snapshot.free[::-1]] = np.arange(len(snapshot.free))[::-1]
    for counts, into in ((snapshot.refs, refs), (snapshot.held, held)):
        into[list(counts)] = list(counts.values())
    for block, named in snapshot.cached.items():
        table[3:, block] = moment.entries.setdefault(named, len(moment.entries) + 1), *named[:2]
    rows = np.zeros((len(ids), len(moment.config.block_sizes), moment.width), int)
    lengths = np.zeros(rows.shape[:2], int)
    for id, groups in snapshot.rows.items():
        for number, row in enumerate(groups):
            rows[ids[id], number, : len(row)], lengths[ids[id], number] = row, len(row)
    free = np.asarray(len(snapshot.free))
    counted = free if snapshot.num_free is None else np.asarray(snapshot.num_free)
    queued = np.bincount(np.array(snapshot.free, int), minlength=blocks)
    return HostPicture(snapshot, queued, *table, rows, lengths, free, counted)


@dataclasses.dataclass(frozen=True)
class HostMoment(ArrayMoment):
    """A moment of a log or an engine in NumPy, which knows besides what no compiled cache is asked.

    Attributes:
      moment: the moment.
      entries: numbers of cached entries.
    """

    moment: Moment
    entries: dict[tuple[int, int, str], int] = dataclasses.field(default_factory=dict)

    xp = np

    @staticmethod
    def of(moment: Moment) -> HostMoment:
        """The arrays of a moment, which all invariants share."""
        found = vars(moment).get("arrays")
        if found is None:
            found = vars(moment)["arrays"] = HostMoment(moment)
        return found

    @property
    def config(self) -> VllmConfig:
        return self.moment.config

    @functools.cached_property
    def before(self) -> HostPicture:
        return host_picture(self.moment.before, self)

    @functools.cached_property
    def after(self) -> HostPicture:
        return host_picture(self.moment.after, self)

    @functools.cached_property
    def _known(self) -> list[dict[str, list[list[int]]]]:
        """Rows of the states that are known: a log need not say both."""
        return [each.rows for each in (self.moment.before, self.moment.after) if not isinstance(each, Unknown)]

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Requests, and their places in arrays."""
        names = dict.fromkeys([*self.moment.ledger.requests, *(id for rows in self._known for id in rows)])
        return {id: place for place, id in enumerate(names)}

    @functools.cached_property
    def names(self) -> list[str]:
        """Requests by their places."""
        return list(self.ids)

    @functools.cached_property
    def width(self) -> int:
        lengths = (len(row) for rows in self._known for groups in rows.values() for row in groups)
        hit = min(getattr(self.moment.answer, "hit", 0) or 0, self.config.max_model_len)
        tokens = max(hit, self.asked) if isinstance(self.operation, oplog.AllocateOp) else hit
        return max([1, *lengths, *map(len, self._hit), -(-int(tokens) // min(self.config.block_sizes))])

    @property
    def slot(self) -> int:
        return self.ids.get(getattr(self.moment.operation, "id", None), -1)  # type: ignore[arg-type]

    @property
    def id(self) -> str:
        """Name of the operation's request."""
        return self.moment.operation.id  # type: ignore[union-attr]

    def does(self, *operations: type) -> np.bool_:
        return np.bool_(isinstance(self.moment.operation, operations))

    may = does

    def mine(self, values: np.ndarray) -> np.ndarray:
        return values[self.slot] if self.slot >= 0 else np.zeros(values.shape[1:], values.dtype)

    def fact(self, name: str) -> Any:
        record = self.moment.ledger.requests[self.id]
        return np.asarray(len(record.tokens) if name == "length" else getattr(record, name))

    def take(self, values: np.ndarray, cells: np.ndarray) -> np.ndarray:
        return values[cells]

    def places(self, cells: np.ndarray) -> np.ndarray:
        counts = np.bincount(cells.ravel(), minlength=self.config.num_blocks)
        counts[0] = 0
        return counts

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

    def owned(self, chosen: np.ndarray) -> np.ndarray:
        cells, cached, book = self.after.rows, self.moment.after.cached, self.moment.book.prefixes
        names, right = self.prefixes(self.after.tokens[cells], chosen), chosen.copy()
        for place in zip(*chosen.nonzero(), strict=True):
            right[place] = names[place] in book.get(cached[cells[place]][2], ())
        return right

    def continues(self, cells: np.ndarray, ends: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        ledger, cached, book = self.moment.ledger, self.moment.after.cached, self.moment.book.prefixes
        right = np.zeros(cells.shape, bool)
        for place in zip(*chosen.nonzero(), strict=True):
            end, names = int(ends[place]), book.get(cached[cells[place]][2], ())
            right[place] = ledger.prefix(self.id, end) in {ledger.cut(name, end) for name in names}
        return right

    @property
    def named(self) -> np.ndarray:
        known = np.zeros(self.config.num_blocks, bool)
        for block, (_, tokens, key) in self.moment.after.cached.items():
            known[block] = tokens in self._lengths(key)
        return known

    def _lengths(self, key: str) -> set[int]:
        return {self.moment.ledger.length(name) for name in self.moment.book.prefixes.get(key, ())}

    def unnamed(self, block: int) -> str:
        """Sentence about a block whose key is of no prefix of as many tokens."""
        group, tokens, key = self.moment.after.cached[block]
        known = ", ".join(map(str, sorted(self._lengths(key))))
        said = f"stands for {known}" if known else "is of no prefix that a request ever had"
        return f"block {block} is cached as {tokens} tokens of group {group} under key {key}, which {said}"

    @property
    def copies_states(self) -> bool:
        return copies_states(self.config)

    @property
    def granted(self) -> np.bool_:
        answer = self.moment.answer
        if isinstance(self.moment.operation, oplog.AllocateOp):
            assert isinstance(answer, oplog.Allocation)
            return np.bool_(answer.blocks is not None)
        return np.bool_(not isinstance(self.moment.operation, oplog.ResetOp) or getattr(answer, "ok", False))

    def _argument(self, name: str) -> Any:
        return np.asarray(getattr(self.moment.operation, name, 0) or 0)

    adopted = property(lambda self: self._argument("hit"))
    external = property(lambda self: self._argument("external"))
    reserved = property(lambda self: self._argument("reserved"))
    encoder = property(lambda self: self._argument("encoder"))
    new = property(lambda self: self._argument("new"))
    settled = property(lambda self: self._argument("tokens"))
    must_fit = property(lambda self: self._argument("must_fit") > 0)
    delay = property(lambda self: self._argument("delay") > 0)

    @property
    def asked(self) -> np.ndarray:
        assert isinstance(self.moment.operation, oplog.AllocateOp)
        return np.asarray(self.moment.ledger.slots(self.moment.operation))

    @property
    def waiting(self) -> np.bool_:
        return np.bool_(self.id not in self.moment.before.rows)

    @property
    def busy(self) -> np.bool_:
        said, rows = getattr(self.moment.operation, "scheduled", None), self.moment.before.rows
        return np.bool_(any(rows[id] for id in rows if id != self.id) if said is None else said)

    @property
    def waits(self) -> np.bool_:
        said = getattr(self.moment.operation, "waiting", None)
        return self.waiting if said is None else np.bool_(said)

    def same(self) -> np.bool_:
        return np.bool_(self.moment.before == self.moment.after)

    @property
    def _hit(self) -> list[list[int]]:
        answer = self.moment.answer
        return answer.blocks if isinstance(answer, oplog.Hit) else []

    @property
    def hit(self) -> np.ndarray:
        assert isinstance(self.moment.answer, oplog.Hit)
        return np.asarray(self.moment.answer.hit)

    @property
    def shared_prefix(self) -> np.ndarray:
        assert isinstance(self.moment.answer, oplog.Hit)
        return np.asarray(self.moment.answer.shared_prefix or 0)

    @functools.cached_property
    def _found(self) -> tuple[np.ndarray, np.ndarray]:
        return self.padded(self._hit)

    def padded(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """int[G, W] and int[G]: rows of each group with zeros beyond, and their columns."""
        table = np.zeros((len(self.config.block_sizes), max([self.width, *map(len, rows)])), int)
        for group, row in enumerate(rows):
            table[group, : len(row)] = row
        return table, np.array([*map(len, rows), *[0] * (len(table) - len(rows))])

    @property
    def found(self) -> np.ndarray:
        return self._found[0]

    @property
    def covered(self) -> np.ndarray:
        return self._found[1]

    @property
    def searched(self) -> int:
        """One more than the most tokens of the hit: those of the request, or as the lookup says."""
        limit = getattr(self.moment.operation, "limit", None)
        return len(self.moment.ledger.requests[self.id].tokens) if limit is None else limit + 1

    def excused(self, direction: str) -> np.bool_:
        named = causes(self.config, self.searched)
        if direction == "less":
            limited = getattr(self.moment.operation, "limit", None) is not None and bool(self.config.eagle_group_ids)
            return np.bool_(limited or any(cause.direction == "less" for cause in named))
        return np.bool_(self.config.partial_hits or named & {Cause.DROP_NOT_REPEATED, Cause.CHUNK_OFF_GRID})

    @functools.cached_property
    def defined(self) -> np.ndarray:
        moment, id = self.moment, self.id
        best = longest_hit_by_definition(
            moment.config, lambda group, end: moment.has_entry(id, group, end), self.searched
        )
        return np.asarray(best)

    @property
    def may_be_hit(self) -> np.bool_:
        """True if the hit is aligned, and leaves the request's last token to compute."""
        return np.bool_(0 <= self.hit < self.fact("length") and self.hit % hit_alignment(self.config) == 0)

    @property
    def told(self) -> np.ndarray | None:
        """int[B]: how often each block is an end of the copies that are told; None where nothing is."""
        if not isinstance(self.moment.answer, list):
            return None
        return np.bincount(np.array(self.moment.answer, int).ravel(), minlength=self.config.num_blocks)

    @property
    def evicted(self) -> np.ndarray:
        return np.isin(np.arange(self.config.num_blocks), self.moment.operation.blocks)  # type: ignore[union-attr]

    @property
    def came(self) -> str:
        """That the request was preempted before, as a phrase."""
        preempted = self.moment.ledger.requests[self.id].preempted
        return f" of {self.id}, which was preempted and has come back," if preempted else ""

    @property
    def diverged(self) -> bool:
        return isinstance(self.moment.answer, oplog.ConnectorHit) and self.moment.answer.diverged

    @property
    def answers_anew(self) -> np.bool_:
        return np.bool_(self.moment.again not in (None, self.moment.answer))

    answer = property(lambda self: self.moment.answer)
    operation = property(lambda self: self.moment.operation)

    @property
    def total(self) -> np.ndarray:
        operation = self.moment.operation
        return np.asarray(self.moment.ledger.total(operation) if isinstance(operation, oplog.AllocateOp) else 0)

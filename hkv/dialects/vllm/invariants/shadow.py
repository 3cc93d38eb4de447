"""Shadow tags and poison: what every slot holds, followed alongside the engine, and compared with what is read.

A slot of the shadow holds the name of the whole prefix that ends in it, as a cold run would have stored it; a block
that nobody can find or use any more holds poison. Computing a token reads what its kind's `reads` says, in the
blocks that the row names, and writes one slot. So a warm read that finds anything else than a cold run stores is seen
at once, whichever rule of the engine led to it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterator

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, RequestRecord, Snapshot, remembering
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Hit, Rows
from hkv.dialects.vllm.traffic.headers import copies_states

STATE = -1
"""The offset under which a recurrent state is filed in its block."""

PASSED = -2
"""The offset of a second state that the block may stand for: the one at its end, which a chunk ran past."""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Tokens of a request that a step computes.

    Attributes:
      record: the request.
      start: first token.
      end: token after the last.
      resumed: nothing was computed by this request before, so `start` is where a hit or a load ends.
      main: tokens that the request has room for.
      rows: its blocks in each group; it may be freed before the step runs.
    """

    record: RequestRecord
    start: int
    end: int
    resumed: bool
    main: int
    rows: list[list[int]]

    @property
    def id(self) -> str:
        """Name of the request."""
        return self.record.id


@remembering("shadow tags", "B-I7", "B-I15", "B-I17")
class Shadow:
    """The content of every block, as operations of an engine leave it. One for each run.

    Args:
      config: the cache's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._copying = copies_states(config)
        self._replayed = max((spec.most_read for spec in config.topology.specs if kinds.layer(spec).replays), default=0)
        self._names: dict[Hashable, int] = {}
        self._prefixes: dict[str, list[int]] = {}
        self._blocks: dict[int, dict[int, int]] = {}
        self._progress: dict[str, int] = {}
        self._fresh: set[str] = set()
        self._pending: list[Computation] = []
        self._arrived: list[tuple[int, int, int]] = []
        self._young: set[int] = set()

    def check(self, moment: Moment) -> Iterator[str]:
        """A warm read returns what a cold run stores: nothing stale, nothing of others, no poison.

        Holds after every operation. Tokens that `advance` counts are computed: each reads the cached values of
        `LayerSpec.reads`, in the row's blocks, and writes its own slot. Nobody resumes from a state of the same
        step. What a block held is gone when it is handed out, or free without a key. Exceptions: rows of `opaque`
        groups, which are never shared; Mamba rows without caching (`none`); a state among rejected drafts, whose
        column the engine leaves null; a chunk that goes beyond the end of a Mamba block that is there, where a
        scheduler would have ended it, or drafts did: the state at the block's end counts as written too; and chunks
        of attention that do not start at blocks (`CHUNK_OFF_GRID`) may begin with a hit's null column.
        """
        operation = moment.operation
        if self._is_due(operation):
            copies = moment.answer if isinstance(operation, oplog.CopiesOp) else ()
            yield from self._flush(moment, list(copies or ()))  # type: ignore[arg-type]
        self._poison(moment.before, moment.after)
        match operation:
            case oplog.StepOp():
                self._young.clear()
            case oplog.RequestOp():
                self._prefixes[operation.id] = []
            case oplog.AllocateOp() if isinstance(moment.answer, oplog.Allocation) and moment.answer.blocks is not None:
                self._grant(moment, operation)
            case oplog.AdvanceOp():
                record = moment.ledger.requests[operation.id]
                start = max(self._progress.get(operation.id, 0), record.computed - operation.tokens)
                self._compute_until(moment, operation.id, start, min(record.computed, len(record.tokens)))
            case oplog.ComputedOp() | oplog.AppendOp():
                self._follow(moment, operation.id)
            case oplog.FreeOp() | oplog.PopOp():
                self._progress.pop(operation.id, None)
                self._fresh.discard(operation.id)
            case _:
                pass

    def _follow(self, moment: Moment, id: str) -> None:
        """Tokens that a live scheduler counts as computed are, once it is known which they are; or no longer.

        Under bounded replay the window before a hit's end is computed once more: what other groups hold of it stays.
        """
        record = moment.ledger.requests[id]
        if id not in self._progress:
            return
        start, end = self._progress[id], min(record.computed, len(record.tokens))
        if record.computed < start - self._replayed:
            self._progress[id] = record.computed
        self._compute_until(moment, id, start, end)

    def _compute_until(self, moment: Moment, id: str, start: int, end: int) -> None:
        if end > start:
            record, rows = moment.ledger.requests[id], moment.after.rows.get(id, [])
            self._pending.append(Computation(record, start, end, id in self._fresh, record.main, rows))
            self._fresh.discard(id)
            self._progress[id] = end

    def _is_due(self, operation: oplog.Operation) -> bool:
        if self._copying:
            return isinstance(operation, oplog.CopiesOp | oplog.StepOp | oplog.ResetOp)
        return bool(self._pending) and not isinstance(operation, oplog.AppendOp | oplog.StateOp | oplog.DigestOp)

    def _grant(self, moment: Moment, operation: oplog.AllocateOp) -> None:
        id = operation.id
        if id in self._progress:
            return
        start = operation.hit + operation.external
        self._progress[id] = start
        self._fresh.add(id)
        if operation.external:
            self._load(moment, id, operation.hit, start)

    def _load(self, moment: Moment, id: str, start: int, end: int) -> None:
        """Tokens that come from elsewhere arrive."""
        names = self._named(moment.ledger.requests[id], end)
        for group, row in enumerate(moment.after.rows.get(id, [])):
            spec, size = self._config.topology.groups[group].spec, self._config.block_size(group)
            positions = range(end - 1, end) if spec.snapshot else range(start, end)
            for position in positions:
                column = position // size
                block = row[column] if column < len(row) else 0
                if block:
                    slot = STATE if spec.snapshot else position % size
                    self._slots(block)[slot] = names[position]
                    self._arrived.append((block, slot, names[position]))

    def _slots(self, block: int) -> dict[int, int]:
        return self._blocks.setdefault(block, {})

    def _poison(self, before: Snapshot, after: Snapshot) -> None:
        """Forgets the content of blocks that were handed out, and of free blocks that no key finds."""
        queued = set(after.free)
        for block in before.free:
            if block not in queued and (block not in before.cached or after.cached.get(block) != before.cached[block]):
                self._blocks.pop(block, None)
        for block in queued:
            if block not in after.cached:
                self._blocks.pop(block, None)

    def _flush(self, moment: Moment, copies: list[tuple[int, int]]) -> Iterator[str]:
        """Runs what was scheduled: all copies at once, each of what its source held before, loads into them, tokens."""
        held = [(dict(self._blocks.get(source, {})), source, target) for source, target in copies]
        for content, source, target in held:
            self._blocks[target] = content
            if source in self._young:
                self._young.add(target)
        targets = {target for _, target in copies}
        for block, slot, name in self._arrived:
            if block in targets:
                self._slots(block)[slot] = name
        self._arrived.clear()
        pending, self._pending = self._pending, []
        for computation in pending:
            if moment.ledger.requests.get(computation.id) is not computation.record:
                continue
            problems = list(self._compute(moment, computation))
            # What a request reads that was freed in this very step goes nowhere; its blocks may be poison by now.
            yield from problems if computation.id in moment.before.rows else ()

    def _compute(self, moment: Moment, work: Computation) -> Iterator[str]:
        record = work.record
        end = min(work.end, len(record.tokens))
        names = self._named(record, end)
        for group, row in enumerate(work.rows):
            spec = self._config.topology.groups[group].spec
            if spec.snapshot:
                if spec.keeps_states:
                    yield from self._step_state(moment, work, group, row, names, end)
            elif spec.prefix_cacheable and not spec.encoder_tokens:
                yield from self._step_tokens(work, group, row, names, end)

    def _step_tokens(self, work: Computation, group: int, row: list[int], names: list[int], end: int) -> Iterator[str]:
        spec, size = self._config.topology.groups[group].spec, self._config.block_size(group)
        for position in itertools.chain(*spec.reads(work.start)):
            column = position // size
            block = row[column] if column < len(row) else 0
            found = self._blocks.get(block, {}).get(position % size) if block else None
            if found != names[position] and (block or not kinds.layer(spec).off_grid):
                yield f"{work.id} reads token {position} of group {group} in block {block}, {self._what(found, block)}"
        for position in range(work.start, end):
            column = position // size
            block = row[column] if column < len(row) else 0
            if not block:
                yield f"{work.id} writes token {position} of group {group} to no block"
                return
            self._slots(block)[position % size] = names[position]

    def _step_state(
        self, moment: Moment, work: Computation, group: int, row: list[int], names: list[int], end: int
    ) -> Iterator[str]:
        size = self._config.block_size(group)
        column = (work.start - 1) // size
        block = row[column] if 0 <= column < len(row) else 0
        if work.start and (block or work.resumed):
            held = self._blocks.get(block, {}) if block else {}
            found = held.get(STATE)
            if work.resumed and block in self._young:
                yield f"{work.id} resumes from the state in block {block}, which this very step computes"
            if names[work.start - 1] not in (found, held.get(PASSED)):
                what = self._what(found, block)
                yield f"{work.id} goes on from the state after {work.start} tokens in block {block}, {what}"
        self._export(moment, work, group, row, names)
        for passed in range(max(column, 0), min(end // size, len(row))):
            boundary = (passed + 1) * size
            if row[passed] and work.start < boundary < end:
                self._slots(row[passed])[PASSED] = names[boundary - 1]
        column = -(-end // size) - 1
        block = row[column] if column < len(row) else 0
        if block and end > work.start:
            self._blocks[block] = {STATE: names[end - 1]}
            self._young.add(block)

    def _export(self, moment: Moment, work: Computation, group: int, row: list[int], names: list[int]) -> None:
        """A state inside the chunk, where the engine planned one: it stands in the column before the last."""
        spec, size = self._config.topology.groups[group].spec, self._config.block_size(group)
        column = -(-work.main // size) - 2
        if not kinds.layer(spec).checkpoint_blocks or not 0 <= column < len(row):
            return
        holder, tokens, _ = moment.before.cached.get(row[column], (-1, 0, ""))
        if holder == group and work.start < tokens <= min(work.end, len(names)):
            self._slots(row[column])[STATE] = names[tokens - 1]

    def _what(self, found: int | None, block: int) -> str:
        if not block:
            return "the null block"
        if found is None:
            return "which nobody has written since the block was handed out"
        return "which holds the content of another prefix"

    def _named(self, record: RequestRecord, end: int) -> list[int]:
        """Names of the prefixes that end in each of the first `end` tokens."""
        names, extra = self._prefixes[record.id], record.extra
        starts = {offset: name for name, offset, _ in extra.multimodal}
        while len(names) < end:
            position = len(names)
            parent = names[-1] if names else -1
            identity = (tuple(extra.lora or ()), extra.salt or "") if position == 0 else ()
            embed = extra.embeds[position] if extra.embeds and position < len(extra.embeds) else None
            content = (parent, record.tokens[position], identity, starts.get(position), embed)
            names.append(self._names.setdefault(content, len(self._names)))
        return names


# Blocks that a worker zeroes are those newly handed out.


@remembering("zeroing", "B-I17", after=(oplog.LookupOp, oplog.AllocateOp, oplog.UnwrittenOp, oplog.ZerosOp))
class Zeroing:
    """Blocks that entered rows without being part of a hit, since they were last zeroed. One for each run.

    Args:
      config: the cache's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._due: collections.Counter[int] = collections.Counter()
        self._found: Rows = []

    def check(self, moment: Moment) -> Iterator[str]:
        """The blocks to be zeroed are those that attention groups were newly handed out, each as often as it was.

        Holds after `zeros`. Exceptions: blocks for tokens that a load is about to write (`loaded`), until it says that
        it did not (`unwritten`); states and `opaque` groups, which are never zeroed.
        """
        operation = moment.operation
        match operation:
            case oplog.LookupOp():
                self._found = moment.answer.blocks if isinstance(moment.answer, Hit) else []
            case oplog.AllocateOp():
                self._note(moment, operation)
            case oplog.UnwrittenOp():
                for group, row in enumerate(moment.after.rows[operation.id]):
                    if self._config.zeroes(group):
                        self._due.update(row[operation.tokens // self._config.block_size(group) :])
            case _:
                assert isinstance(moment.answer, list)
                listed = collections.Counter(moment.answer)
                if missing := sorted((self._due - listed).elements()):  # type: ignore[operator]
                    yield f"blocks {missing} were handed out, and are not zeroed"
                if strange := sorted((listed - self._due).elements()):  # type: ignore[operator]
                    yield f"blocks {strange} are zeroed, and were not handed out"
                self._due.clear()

    def _note(self, moment: Moment, operation: oplog.AllocateOp) -> None:
        if not self._config.zeroing or not isinstance(moment.answer, Allocation) or moment.answer.blocks is None:
            return
        before = moment.before.rows.get(operation.id)
        hit = operation.rows if operation.rows is not None else self._found if operation.hit else []
        for group, row in enumerate(moment.after.rows[operation.id]):
            # By column: a block that a window has just given back may come again further on.
            known = before[group] if before else hit[group] if hit else []
            new = [block for column, block in enumerate(row) if block and known[column : column + 1] != [block]]
            if operation.external and group in operation.loaded:
                new = [block for block in new if block in moment.answer.blocks[group]]
            if self._config.zeroes(group):
                self._due.update(new)

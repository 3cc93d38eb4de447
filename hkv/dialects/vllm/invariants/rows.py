"""Rows are as long as they must be, and hold what can still be read, no more."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, Snapshot, invariant, remembering
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation


@invariant("retirement", "B-I14", "B-I38", after=(AllocateOp,))
def retirement(moment: Moment) -> Iterator[str]:
    """A block has left the row if and only if no token still to be processed can read it.

    Holds after `allocate`, for the request it names: columns of which the query at its processed tokens reads
    nothing any more (`VllmLayer.retired`) are null, all others are not. Exceptions: a refused `allocate` may not
    have come to retiring yet, so columns may still be there; what is kept without being read a hit does not bring;
    Mamba rows have null columns between states too; chunks that do not start at blocks may begin with a hit that
    nobody looked at (`CHUNK_OFF_GRID`). 20 tokens of which 3 are in flight count as 17: a window of 8 in blocks of
    4 reads from token 10 on, columns 0 and 1 are null.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, AllocateOp)
    assert isinstance(answer, Allocation)
    record = moment.ledger.requests[operation.id]
    came = f" of {operation.id}, which was preempted and has come back," if record.preempted else ""
    for group, row in enumerate(moment.after.rows.get(operation.id, [])):
        spec = moment.config.topology.groups[group].spec
        size = moment.config.block_size(group)
        layer = kinds.layer(spec)
        outgrown = layer.retired(record.processed, size)
        left, end = row[outgrown.start : outgrown.stop], min(outgrown.stop, len(row)) * size
        if answer.blocks is not None and any(left):
            yield f"group {group}{came} still has {left}, though nothing of it is read before token {end}"
        unread = kinds.layer(layer.keeping(0)).retired(record.processed, size) if layer.kept_beyond else outgrown
        kept = [block for column, block in enumerate(row) if column not in unread]
        if not spec.snapshot and not layer.off_grid and 0 in kept:
            yield f"group {group}{came} has lost a block of {kept}, though all of its tokens are read"


@invariant("room", "B-I12", "B-I16", after=(AllocateOp,))
def room(moment: Moment) -> Iterator[str]:
    """A row has exactly the columns for the most tokens it was granted, look-ahead for drafts included.

    Holds after a granted `allocate`, for the request it names. Cross attention has columns for the most tokens of an
    encoder's output that were granted, and no others. Exceptions: `opaque` rows have one column always; Mamba
    rows keep drafts in `num_speculative_blocks` columns of their own, and with states at block ends (`align`) do not
    count look-ahead: 8 tokens and 3 of look-ahead in blocks of 4 are 3 columns of attention, 2 + 2 of such a Mamba.
    """
    operation, answer, config = moment.operation, moment.answer, moment.config
    assert isinstance(operation, AllocateOp)
    assert isinstance(answer, Allocation)
    if answer.blocks is None:
        return
    record, rows = moment.ledger.requests[operation.id], moment.after.rows.get(operation.id, [])
    for group, spec in enumerate(config.topology.specs):
        row, size = rows[group] if group < len(rows) else [], config.block_size(group)
        if spec.one_block:
            columns = 1
        elif spec.encoder_tokens:
            columns = -(-record.encoder // size)
        else:
            tokens = record.main if spec.keeps_states else record.slots
            columns = -(-tokens // size) + spec.scratch_blocks
        if len(row) != columns:
            yield f"group {group} has {len(row)} columns for {record.slots} tokens, not {columns}"


@invariant("admission", "B-I24", after=(AllocateOp,))
def admission(moment: Moment) -> Iterator[str]:
    """A refusal takes nothing, only what does not fit is refused, and a grant leaves free what was to stay free.

    Holds after `allocate`. Exceptions: a refused running request may have retired columns it outgrew: its row is
    the same but for more nulls. With Mamba groups, a grant to a running request or with tokens from elsewhere may
    use what is set aside, as the engine counts a state too few. A hit on a Mamba state, or inside a block, of this
    very step waits for the next, however much is free. Where the engine's estimate is a bound (Mamba rows; a hit,
    of which some blocks are in use and some are not; tokens from elsewhere; a request that must fit whole) a
    refusal is judged by whole rows: two groups with blocks of 4 and 20 free blocks take 20 tokens whatever the
    rest.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, AllocateOp)
    assert isinstance(answer, Allocation)
    mamba = any(spec.snapshot for spec in moment.config.topology.specs)
    spared = operation.reserved + _watermark(moment)
    free = len(moment.after.free)
    if answer.blocks is not None:
        counted = not mamba or (operation.id not in moment.before.rows and not operation.external)
        if free < spared and counted:
            yield f"granted, and {free} blocks are left free of {spared} set aside"
        return
    yield from _changed(moment, operation.id)
    simple = not (mamba or operation.hit or operation.external or operation.must_fit)
    needs = _needed(moment) if simple else _most_needed(moment)
    if free - spared >= needs and not (mamba and operation.hit):
        yield f"refused with {free} blocks free, {spared} set aside, and {needs} needed"


def _changed(moment: Moment, id: str) -> Iterator[str]:
    before, after = moment.before, moment.after
    if before.cached != after.cached:
        yield "a refusal changed keys"
    if id not in before.rows:
        if before != after:
            yield "the refusal of a waiting request changed the cache"
    elif _without(before.rows, id) != _without(after.rows, id):
        yield "the refusal of a request changed others' rows"
    elif not all(map(_only_nulled, before.rows[id], after.rows[id])):
        yield f"the refusal changed {before.rows[id]} to {after.rows[id]}"


def _watermark(moment: Moment) -> int:
    """Blocks that stay free when a waiting request is admitted while others run."""
    operation = moment.operation
    assert isinstance(operation, AllocateOp)
    busy = any(moment.before.rows.get(id) for id in moment.before.rows if id != operation.id)
    busy = busy if operation.scheduled is None else operation.scheduled
    waits = operation.id not in moment.before.rows if operation.waiting is None else operation.waiting
    return moment.config.watermark_blocks if busy and waits else 0


def _needed(moment: Moment) -> int:
    """Columns that the row is short of."""
    operation, config = moment.operation, moment.config
    assert isinstance(operation, AllocateOp)
    rows = moment.before.rows.get(operation.id, [[] for _ in config.block_sizes])
    slots, specs = moment.ledger.slots(operation), config.topology.specs
    encoder = operation.encoder or 0
    asked = [encoder if spec.encoder_tokens else slots for spec in specs]
    wanted = [-(-tokens // size) for tokens, size in zip(asked, config.block_sizes, strict=True)]
    opaque = [spec.one_block for spec in specs]
    columns = [1 if fixed else count for fixed, count in zip(opaque, wanted, strict=True)]
    return sum(max(0, count - len(row)) for count, row in zip(columns, rows, strict=True))


def _without(rows: dict[str, list[list[int]]], id: str) -> dict[str, list[list[int]]]:
    return {other: row for other, row in rows.items() if other != id}


def _only_nulled(before: list[int], after: list[int]) -> bool:
    return len(before) == len(after) and all(new in (old, 0) for old, new in zip(before, after, strict=True))


def _most_needed(moment: Moment) -> int:
    """More blocks than any rule could ask for: whole rows, scratch, a checkpoint, a copy and an external state each."""
    operation, config = moment.operation, moment.config
    assert isinstance(operation, AllocateOp)
    tokens = max(moment.ledger.slots(operation), len(moment.ledger.requests[operation.id].tokens))
    tokens = max(tokens, operation.encoder or 0)
    scratch = sum(spec.scratch_blocks for spec in config.topology.specs)
    return scratch + sum(-(-tokens // size) + 4 for size in config.block_sizes)


# Rules of admission, checked by counting, block by block, what a grant would take out of the queue.


@remembering("hit admission", "B-I24", needs=("references",))
class HitAdmission:
    """Remembers the last hit, the keys of this step and how far requests had come before it, and counts. One a run.

    Args:
      config: the cache's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._recurrent = any(spec.snapshot for spec in config.topology.specs)
        self._found: oplog.Hit | None = None
        self._young: set[tuple[int, str]] = set()
        self._came: dict[str, int] = {}

    def check(self, moment: Moment) -> Iterator[str]:
        """A waiting request is granted blocks if and only if those it needs are free besides those set aside.

        It needs a block for each column that is still read or to be written, less the columns of its hit that
        somebody uses already, and one for a hit that ends inside a block. Holds after `allocate` of a waiting request.
        Exceptions: of requests that must fit whole only grants are judged, by what full attention takes; with Mamba
        groups only refusals are, by a bound that no rule can exceed, and not those of a hit that will be copied
        before it is written: on a state that got its key, or was moved to a copy, in this very step; inside a block
        that got its key in this step, unless a running request in whose row it stands had come so far before.
        """
        operation, answer = moment.operation, moment.answer
        if isinstance(operation, oplog.StepOp):
            self._young.clear()
            self._came = {id: record.computed for id, record in moment.ledger.requests.items()}
        elif isinstance(operation, oplog.FreeOp | oplog.PopOp):
            self._came.pop(operation.id, None)
        elif isinstance(operation, oplog.LookupOp) and isinstance(answer, oplog.Hit):
            self._found = answer
        elif isinstance(operation, oplog.AllocateOp) and operation.id not in moment.before.rows:
            granted = isinstance(answer, oplog.Allocation) and answer.blocks is not None
            judge = self._judge_gate if operation.must_fit else self._judge
            yield from judge(moment, operation, granted)
        self._young |= {
            (group, key)
            for block, (group, tokens, key) in moment.after.cached.items()
            if moment.before.cached.get(block) != (group, tokens, key)
        }

    def _judge_gate(self, moment: Moment, operation: oplog.AllocateOp, granted: bool) -> Iterator[str]:
        """Problems of an allocation that must fit whole: full attention's blocks, counted alone, do not fit."""
        hit = self._adopted(operation)
        length = min(len(moment.ledger.requests[operation.id].tokens), self._config.max_model_len)
        needed = 0
        for group, row in enumerate(hit):
            if self._config.topology.groups[group].spec.reads_all:
                used = sum(block != 0 and not _is_free(moment.before, block) for block in row)
                needed += -(-length // self._config.block_size(group)) - used
        free = len(moment.before.free) - self._set_aside(moment, operation)
        if granted and needed > free:
            yield f"granted with {free} blocks free, where the whole request takes {needed} of full attention alone"

    def _adopted(self, operation: oplog.AllocateOp) -> list[list[int]]:
        found = self._found
        if operation.rows is not None:
            return operation.rows
        return found.blocks if operation.hit and found is not None else [[] for _ in self._config.block_sizes]

    def _set_aside(self, moment: Moment, operation: oplog.AllocateOp) -> int:
        """The watermark, while another request runs."""
        others = any(moment.before.rows.get(id) for id in moment.before.rows)
        others = others if operation.scheduled is None else operation.scheduled
        return self._config.watermark_blocks if others and operation.waiting is not False else 0

    def _judge(self, moment: Moment, operation: oplog.AllocateOp, granted: bool) -> Iterator[str]:
        before = moment.before
        hit = self._adopted(operation)
        free = len(before.free) - operation.reserved - self._set_aside(moment, operation)
        if self._recurrent:
            waits = any(self._waits(moment, operation.hit, group, row) for group, row in enumerate(hit))
            if not granted and not waits and free >= self._bound(moment, operation):
                yield f"refused with {free} blocks free, and less than {self._bound(moment, operation)} needed"
            return
        needed = sum(self._cost(moment, operation, group, row) for group, row in enumerate(hit))
        if granted != (needed <= free):
            yield f"{'granted' if granted else 'refused'} with {free} blocks free and {needed} needed"

    def _waits(self, moment: Moment, hit: int, group: int, row: list[int]) -> bool:
        """True if the block a hit ends in is written in this very step, and would be copied before that."""
        before, size = moment.before, self._config.block_size(group)
        if not row or row[-1] not in before.cached or before.cached[row[-1]][::2] not in self._young:
            return False
        if self._config.topology.groups[group].spec.snapshot:
            return True
        owners = (id for id, rows in before.rows.items() if rows[group][len(row) - 1 : len(row)] == row[-1:])
        return hit % size > 0 and all(self._came.get(id, 0) < hit for id in owners)

    def _cost(self, moment: Moment, operation: oplog.AllocateOp, group: int, hit: list[int]) -> int:
        spec, size = self._config.topology.groups[group].spec, self._config.block_size(group)
        if spec.one_block:
            return 1
        if spec.encoder_tokens:
            return -(-(operation.encoder or 0) // size)
        start = moment.ledger.requests[operation.id].computed + operation.hit + operation.external
        skipped = kinds.layer(spec).retired(start, size)
        columns = range(len(hit), -(-moment.ledger.slots(operation) // size))
        new = sum(column not in skipped for column in columns)
        adopted = sum(_is_free(moment.before, block) for column, block in enumerate(hit) if column not in skipped)
        return new + adopted + (1 if hit and operation.hit % size else 0)

    def _bound(self, moment: Moment, operation: oplog.AllocateOp) -> int:
        scratch = sum(spec.scratch_blocks for spec in self._config.topology.specs)
        tokens = max(moment.ledger.slots(operation), operation.encoder or 0)
        return scratch + sum(-(-tokens // size) + 4 for size in self._config.block_sizes)


def _is_free(before: Snapshot, block: int) -> bool:
    return block != 0 and block not in before.refs

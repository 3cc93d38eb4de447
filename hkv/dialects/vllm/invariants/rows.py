"""Rows are as long as they must be, and hold what can still be read, no more."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation


@invariant("retirement", "B-I14", "B-I38", after=(AllocateOp,))
def retirement(moment: Moment) -> Iterator[str]:
    """A block has left the row if and only if no token still to be processed can read it.

    Holds after `allocate`, for the request it names: columns of which the query at its processed tokens reads
    nothing any more (`LayerSpec.retired`) are null, all others are not. Exceptions: a refused `allocate` may not
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
        outgrown = spec.retired(record.processed, size)
        left, end = row[outgrown.start : outgrown.stop], min(outgrown.stop, len(row)) * size
        if answer.blocks is not None and any(left):
            yield f"group {group}{came} still has {left}, though nothing of it is read before token {end}"
        unread = spec.keeping(0).retired(record.processed, size) if spec.kept_beyond else outgrown
        kept = [block for column, block in enumerate(row) if column not in unread]
        if not spec.snapshot and not spec.off_grid and 0 in kept:
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

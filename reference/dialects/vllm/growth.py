"""Growth: rows adopt a hit, get blocks for tokens that come from elsewhere, and then for those to be computed.

First every group adopts its hit: in this order no group's fresh block can be another group's hit. A row of states is
indexed by position: it ends in the running state, then come scratch states of drafts; columns that it passed are null.

After vLLM 0.33 `add_local_computed_blocks`, `allocate_external_computed_blocks` and `allocate_new_blocks`.
"""

from __future__ import annotations

from reference.dialects.vllm.admission import wanted_columns
from reference.dialects.vllm.pool import enter, offer, primary, take, tell_zeroed, touch, withdraw
from reference.dialects.vllm.records import (
    NONE,
    Block,
    Cache,
    Failure,
    Group,
    Kind,
    Operation,
    Request,
    Result,
    Row,
    ceil,
    passed,
)
from reference.language import Text, clause

TEXT = Text(__name__)


def adopt(c: Cache, request: Request, hit: int, total: int) -> None:
    """Rows begin with the blocks of a hit, null where they are no longer needed."""
    local = request.computed + hit
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        if group.kind not in (Kind.RING, Kind.ENCODER):
            clause("adopt", "SingleTypeKVCacheManager.add_local_computed_blocks")
            stop, end = passed(group, total), row.found if hit > 0 else 0
            begin = max(row.first_found, stop) if end > 0 else stop
            length = max(end, stop) if stop > group.sinks and end >= group.sinks else end
            row.begin, row.length, row.looked = begin, length, length
            for column in range(0 if c.config.sinks and group.sinks > 0 else begin, end):
                if not c.config.sinks or column < group.sinks or column >= begin:
                    block = row.blocks[column]
                    if block is not None:
                        touch(c, block)
            column = local // group.size
            read = column >= stop or column < group.sinks
            if c.config.parts > 1 and local % group.size > 0 and column < end and read:
                row.shared, row.looked = column + 1, column


def grow(c: Cache, op: Operation, request: Request, result: Result, total: int, main: int, slots: int) -> None:
    """Every row gets blocks, first for tokens that come from elsewhere, then for those to be computed."""
    for comes in (1, 0):
        if op.external > 0 or not comes:
            for g in range(1, c.config.width + 1):
                group, row = c.groups[g], request.rows[g]
                start, stop, copies = row.length, 0, 0
                if comes:
                    end = loaded_columns(c, op, group, total)
                    stop = passed(group, total)
                    if c.config.sinks and stop > group.sinks and end > 0:
                        row.begin = max(row.begin, stop)
                else:
                    end = wanted_columns(op, group, slots)
                    if c.config.tells:
                        result.first[g] = row.length
                    if c.config.states and group.kind == Kind.STATE:
                        end = ceil(main, group.size) + group.scratch
                        pass_over(row, group.scratch, end - group.scratch - 1)
                        start = row.length
                    copies = c.config.parts > 1 and row.shared > 0
                for column in range(start - copies, max(start, end)):
                    if not c.config.sinks or column < group.sinks or column >= stop:
                        block = take(c, group)
                        if c.config.parts > 1 and column < start:
                            copy(c, request, group, row, result, block)
                        else:
                            row.blocks[column] = block
                        if not comes or not op.loaded[g]:
                            tell_zeroed(c, group, block)
                row.length = max(start, end)
                if not comes:
                    row.grown = 1
                    if c.config.tells:
                        result.end[g] = row.length


def loaded_columns(c: Cache, op: Operation, group: Group, total: int) -> int:
    """Columns that a row has once tokens come from elsewhere: none where the last range that is read has none of
    them."""
    if group.kind == Kind.RING:
        return 1
    unread = total // group.unit * group.unit - group.lookback
    nothing = group.sinks == 0 and unread > 0 and min(total - unread, op.external) <= 0
    return 0 if nothing or group.kind == Kind.ENCODER else ceil(total, group.size)


def pass_over(row: Row, scratch: int, running: int) -> None:
    """Columns up to the running state's are null, but for one in which a chunk leaves a state, and scratch moves behind
    them."""
    end = row.length
    stop = running - (row.planned > 0)
    if running + 1 + scratch > end or row.shared > 0 or row.planned > 0:
        length = max(end, stop) if end < running else end
        for column in range(end, length):
            row.blocks[column] = NONE
        if row.grown:
            for column in range(max(end - scratch, 0), min(end, stop)):
                row.blocks[length] = row.blocks[column]
                row.blocks[column] = NONE
                length += 1
        row.length = length


def copy(c: Cache, request: Request, group: Group, row: Row, result: Result, block: Block) -> None:
    """A new block is to be a copy of the shared one. A hit goes on in the copy; the owner of a running state goes on in
    place, and the copy is the cache's, which finds it from now on. Both are held until the copy is made."""
    column, owns = row.shared - 1, c.config.states and group.kind == Kind.STATE and row.grown
    source = row.blocks[column]
    row.shared = 0
    if c.defects.tail_key_outlives_state and owns and column < row.begin:
        clause("tail-key-outlives-state", "MambaManager._cache_partial_tail_block", "defect: a copy of what is gone")
        c.failed = Failure.TAIL
    else:
        c.pending += 1
        result.copies += 1
        made = c.copies[c.pending]
        made.group, made.source, made.target, made.adopted = group, source, block, not owns
        if owns:
            clause("copy/owner", "MambaManager.allocate_new_blocks", "an owner goes on, its entry moves to a copy")
            source.refs += 1
            move_keys(c, source, block)
            if c.config.offering and row.tail is not None:
                offer(c, group, request, block, row.tail)
                row.tail = NONE
        else:
            clause("copy/hit", "SingleTypeKVCacheManager.allocate_new_blocks", "a hit inside a block is copied")
            row.blocks[column] = block
            block.refs += 1


def move_keys(c: Cache, source: Block, target: Block) -> None:
    """A block without keys is found instead of another; hits on a state wait for the next step."""
    for part in range(c.config.parts):
        entry = source.known[part]
        if entry is not None:
            withdraw(c, source, part)
            enter(c, target, part, entry)
    moved = primary(c, target)
    if moved is not None:
        moved.fresh = c.step

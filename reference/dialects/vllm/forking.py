"""Forking: a request is started from a running one, in the middle of its life, and shares what both will only read.

No engine's rule, but what block tables are for. The new request has the tokens, keys and computed tokens of the other.
It shares every block that is full, and gets its own copy of the last one if that is still being written.
"""

from __future__ import annotations

from reference.dialects.vllm.pool import take, touch
from reference.dialects.vllm.records import Cache, Group, Kind, Request, Result, Row, at_column, passed
from reference.language import Text, clause

TEXT = Text(__name__)


def fork(c: Cache, parent: Request, child: Request, result: Result) -> bool:
    """Starts a request from a running one; False, and nothing changes, where a block that would be shared or copied is
    not there, or too few are free. The answer has the columns that are copied: of the child, new blocks."""
    clause("fork")
    copies, missing = 0, False
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], parent.rows[g]
        shared, copied = spans(group, row, parent.computed)
        copies += copied
        missing = missing or lacks(group, row, parent.computed, shared + copied)
    if missing or copies > c.free.count:
        return False
    for g in range(1, c.config.width + 1):
        group, row, mine = c.groups[g], parent.rows[g], child.rows[g]
        shared, copied = spans(group, row, parent.computed)
        if copied > 0:
            mine.blocks[shared] = take(c, group)
        begin = min(row.begin, shared + copied)
        for column in range(0 if group.sinks > 0 else begin, shared):
            block = at_column(group, row, column)
            mine.blocks[column] = block
            if block is not None:
                touch(c, block)
        mine.begin, mine.length, mine.looked = begin, shared + copied, shared
        result.first[g], result.end[g] = shared, shared + copied
    for at in range(parent.keys):
        child.chain[at] = parent.chain[at]
    child.present, child.running, child.reports, child.keys = 1, 1, parent.reports, parent.keys
    child.tokens, child.prompt, child.computed = parent.tokens, parent.prompt, parent.computed
    child.flying, child.room, child.branch = parent.flying, parent.computed, parent.branch
    child.grant_step, child.granted, child.joined = c.step, parent.computed, 1
    c.scheduled += 1
    return True


def spans(group: Group, row: Row, computed: int) -> tuple[int, int]:
    """Columns of a row that are shared, and that are copied after them: none or one."""
    if group.kind == Kind.ENCODER:
        return row.length, 0
    if group.kind == Kind.RING:
        return 0, 1
    return computed // group.size, computed % group.size > 0


def lacks(group: Group, row: Row, computed: int, needed: int) -> bool:
    """True if a block is not there that the next token reads."""
    if row.length < needed:
        return True
    stop = needed - 1 if group.kind == Kind.STATE else passed(group, computed)
    for column in range(needed):
        skipped = column < stop and (column >= group.sinks or group.kind == Kind.STATE)
        if not skipped and at_column(group, row, column) is None:
            return True
    return False

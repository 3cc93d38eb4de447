"""Admission: how many free blocks a request's next tokens cost, before anything is taken.

The engine's estimate decides. Of states it may be too small, or below 0; then what would really be taken decides too,
for without that the allocation would fail halfway. A hit that needs what this very step writes is never granted.

After vLLM 0.33 `get_num_blocks_to_allocate` of the managers of each kind, and `mamba_utils.py`.
"""

from __future__ import annotations

from reference.dialects.vllm.pool import primary
from reference.dialects.vllm.records import Cache, Failure, Group, Kind, Operation, Request, Row, ceil, passed
from reference.language import Text, clause

TEXT = Text(__name__)


def fits(c: Cache, op: Operation, request: Request, hit: int, total: int, main: int, slots: int, whole: int) -> bool:
    """True if lengths up to which slots are asked for cost no more than what is free, and than there is.

    Args:
      c: the cache.
      op: what asks.
      request: who asks.
      hit: tokens of the hit that would be adopted.
      total: tokens that are computed then, with those from elsewhere.
      main: tokens that get slots.
      slots: the same with those of drafts to come.
      whole: whether the question is if the whole request could ever run; then nothing is about to be taken.
    """
    local, asked, taken, exact, late = request.computed + hit, 0, 0, 0, False
    free = c.free.count - headroom(c, op, request) - (0 if whole else op.reserved)
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        end = row.found if hit > 0 else 0
        waits = end > 0 and must_wait(c, request, group, row, local, end)
        said, takes, really = 0, 0, 0
        if waits:
            clause("refuse/unwritten", "MambaManager.get_num_blocks_to_allocate", "a hit waits for what a step writes")
            late = True
        elif group.kind == Kind.STATE:
            said, takes, really = states_cost(c, request, group, row, local, total, main, end, whole)
        else:
            said = blocks_cost(c, op, group, row, local, total, slots, end, whole)
            takes, really = said, said
        asked += said
        taken += takes
        exact += really
        if c.config.explains:
            row.asked, row.takes, row.late = said, takes, waits
    granted = not late and asked <= free
    if c.config.states and granted and not whole and taken > c.free.count:
        clause("refuse/halfway", "", "an estimate is too small: granted, the allocation would fail halfway")
        granted = False
        if c.config.explains:
            free = c.free.count
    if not granted:
        if c.config.explains:
            c.whole, c.usable, c.halfway = whole, free, not late and asked <= free and taken > free
        if c.config.exporting and not whole and not c.defects.plan_outlives_refusal:
            for g in range(1, c.config.width + 1):
                request.rows[g].planned = 0
    if (c.defects.external_state_not_counted or c.defects.negative_estimate) and granted and not whole:
        clause("fails-halfway", "KVCacheManager.allocate_slots", "defect: an allocation fails halfway")
        if exact > c.free.count:
            c.failed = Failure.BLOCKS
    return granted


def headroom(c: Cache, op: Operation, request: Request) -> int:
    """Blocks that stay free when a request is admitted while others run."""
    waits = not request.running if op.waits < 0 else op.waits
    others = c.scheduled > 0 if op.others < 0 else op.others
    return c.config.watermark if waits and others else 0


def must_wait(c: Cache, request: Request, group: Group, row: Row, local: int, end: int) -> bool:
    """True if a hit needs what this very step writes, before it is written: a state, or a block that it ends inside,
    which would be copied before the step runs."""
    if not c.config.partial and not c.config.states:
        return False
    block = row.blocks[end - 1]
    if block is None:
        return False
    if group.kind == Kind.STATE:
        entry = primary(c, block)
        return entry is not None and entry.fresh == c.step
    if c.defects.copied_before_written:
        clause("copied-before-written", "FullAttentionManager", "defect: a block is copied before it is written")
        return False
    return group.kind == Kind.FULL and block.stamp == c.step and local % group.size > block.written


def queued(c: Cache, group: Group, row: Row, start: int, end: int) -> int:
    """Blocks of a hit's columns from `start` on, and of the sinks, that will leave the free queue."""
    count = 0
    for column in range(0 if c.config.sinks and group.sinks > 0 else start, end):
        if not c.config.sinks or column < group.sinks or column >= start:
            block = row.blocks[column]
            if block is not None and block.refs == 0:
                count += 1
    return count


def blocks_cost(
    c: Cache, op: Operation, group: Group, row: Row, local: int, total: int, slots: int, end: int, whole: int
) -> int:
    """Blocks that attention costs: new ones, free ones of the hit, one for a copy."""
    wanted = wanted_columns(op, group, slots)
    if whole:
        wanted = min(wanted, group.cap)
    if row.looked >= 0:
        return max(wanted - row.length, 0) + (row.shared > 0)
    stop = passed(group, 0 if group.kind == Kind.ENCODER else total)
    known, skips = row.length + end, stop > group.sinks
    new = max(0, wanted - max(known, stop if skips else 0))
    if c.config.sinks and skips:
        new += max(0, group.sinks - known)
    if end > 0:
        new += queued(c, group, row, max(row.first_found, stop), end) + (local % group.size > 0)
    return new


def wanted_columns(op: Operation, group: Group, slots: int) -> int:
    """Columns that a row is to have for so many slots: one of a ring, and those of an encoder's output."""
    if group.kind == Kind.RING:
        return 1
    return ceil(op.encoder if group.kind == Kind.ENCODER else slots + group.spare, group.size)


def states_cost(
    c: Cache, request: Request, group: Group, row: Row, local: int, total: int, main: int, end: int, whole: int
) -> tuple[int, int, int]:
    """Blocks that states are said to cost, those that decide whether there are enough, and those that are taken.

    The estimate: one running state, scratch of a request that has none yet, a state that the chunk leaves behind, a
    copy. It leaves out the state for tokens from elsewhere, and may be below 0 after rejected drafts.
    """
    clause("states-cost", "MambaManager.get_num_blocks_to_allocate")
    inside, start = local % group.size > 0, 0
    loads = row.looked < 0 and total > local
    if loads:
        start = max(0, total - 1) // group.size
    reused, kept = 0, 0
    for column in range(row.first_found, end):
        block = row.blocks[column]
        if block is not None and block.refs == 0:
            reused += 1
            kept += column >= start
    copied, copies = row.shared > 0 or (end > 0 and inside), row.shared > 0 or (end > start and inside)
    columns = ceil(main, group.size)
    new = columns + group.scratch - end - row.length
    if copied:
        new = max(new, 0) + 1
    position = 0
    if c.config.exporting:
        position = position_in_chunk(c, request, group, row, total, main)
        if not whole:
            plan(c, group, row, total, columns, position)
    if new > 0:
        new = min(new, 1 + copied + (position > 0) + (0 if row.grown else group.scratch))
    length = row.length if row.length > 0 else end
    loaded = 0
    if loads:
        length = max(start, end)
        loaded = max(0, ceil(total, group.size) - length)
        length += loaded
    running = columns - 1
    stop = running - (row.planned > 0)
    padded = max(length, stop) if length < running else length
    if row.grown:
        padded += max(0, min(length, stop) - max(0, length - group.scratch))
    really = loaded + max(0, columns + group.scratch - padded) + copies + kept
    takes = really
    if c.defects.external_state_not_counted and loaded > 0:
        clause("external-state-not-counted", "MambaManager", "defect: a loaded state is not in the estimate")
        takes = new + reused
    if c.defects.negative_estimate and loaded == 0:
        clause("negative-estimate", "MambaManager", "defect: an estimate below 0 counts as though blocks came back")
        takes = new + reused
    return new + reused, takes, really


# ------------------------------------------------------------------ states inside chunks


def resumable(c: Cache, tokens: int, unit: int) -> int:
    """The last length, below so many tokens and a multiple of `unit`, at which a repeated prompt could find a state."""
    clause("resumable", "get_mamba_prefill_checkpoint_position")
    if c.config.eagle:
        return max(0, tokens // unit - 1) * unit
    return max(0, tokens - max(1, c.config.lookahead)) // unit * unit


def position_in_chunk(c: Cache, request: Request, group: Group, row: Row, total: int, main: int) -> int:
    """The length at which a chunk of a prompt, from `total` tokens up to `main`, leaves a state behind for later
    requests; 0 for none. It is one that its kernels can export, and there is a column that is not used."""
    position, column = resumable(c, main, c.config.alignment), ceil(main, group.size) - 2
    if group.exports == 0 or (c.config.interval == 0 and main < max(request.prompt, request.tokens - 1)):
        return 0
    if total % c.config.hash > 0 or column < ceil(total, group.size) or column < 0:
        return 0
    if position < total + c.config.hash or position >= main or (position - total) % group.exports > 0:
        return 0
    held = column >= row.begin and column < row.length and row.blocks[column] is not None
    if held and not (row.grown and column >= row.length - group.scratch):
        return 0
    clause("mamba/checkpoint", "is_mamba_prefill_checkpoint_valid", "a state inside a prefill chunk is kept")
    return position


def plan(c: Cache, group: Group, row: Row, total: int, columns: int, position: int) -> None:
    """Notes what the chunk leaves behind, and of the chunk before what is not looked at yet though others follow: keys
    lag behind tokens, and steps on their way retire nothing."""
    if row.planned > 0:
        if row.begun > 0:
            leave(row, row.begun - 1)
        if c.defects.checkpoint_under_later_key:
            clause("checkpoint-under-later-key", "MambaManager.cache_blocks", "defect: a state gets a later key")
        else:
            leave(row, row.planned_at)
    row.planned, row.planned_at, row.begun = position, columns - 2, 0
    if position > 0 and total % group.size > 0 and not c.defects.begun_state_under_later_key:
        row.begun = total // group.size + 1


def leave(row: Row, column: int) -> None:
    """A column that holds another state than the one at its end is not to be registered when it is looked at."""
    if column >= max(row.looked, 0):
        row.stands[column] = 1

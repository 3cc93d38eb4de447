"""Registration: what of a request's filled blocks enters the cache, and which of them are worth it.

A block is looked at once. Full ones enter under the key of all that precedes them; then comes the prompt's tail, inside
a block that goes on to be filled, or the state of exactly so many tokens.

After vLLM 0.33 `KVCacheManager.cache_blocks`, `BlockPool.cache_full_blocks`, `cache_partial_block` and the managers'
`reachable_block_mask`.
"""

from __future__ import annotations

from reference.dialects.vllm.admission import resumable
from reference.dialects.vllm.pool import drop_keys, entry_of, note, offer, primary, register, tell_stored
from reference.dialects.vllm.records import (
    DENSE,
    NONE,
    UNBOUNDED,
    Block,
    Cache,
    Entry,
    Failure,
    Fate,
    Group,
    Kind,
    Request,
    Row,
    at_column,
    ceil,
)
from reference.language import Text, clause, seldom

TEXT = Text(__name__)


def cacheable(c: Cache, group: Group, tokens: int) -> int:
    """Tokens that a group may register: up to a whole scheduler block, for no hit ends elsewhere unless it may end
    inside blocks; under the EAGLE drop one block more, which a hit gives up. What a draft may prefill again is left
    out."""
    clause("cacheable", "KVCacheCoordinator.get_num_cacheable_tokens")
    settled = max(0, tokens - c.config.prefill)
    if c.config.alone:
        return settled
    unit = 1 if c.config.partial else c.config.grid
    aligned = tokens // unit * unit
    if group.drops and aligned > 0:
        return min(settled, settled // unit * unit + group.size)
    return aligned


def enter_filled(c: Cache, request: Request, tokens: int) -> None:
    """Enters blocks that the first `tokens` tokens of a request filled into the cache, group by group."""
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        if group.cached:
            settled, done = cacheable(c, group, tokens), max(row.looked, 0)
            full = min(settled, request.keys * c.config.hash) // group.size
            if full > done:
                row.looked = full
            full, tail, where = max(full, done), 0, 0
            if c.config.parts > 1 or c.config.states:
                tail, where = tail_of(c, request, group, row, settled)
            if c.config.explains and full > done:
                of_span(c, request, group, row, done, full)
            if seldom(tail > 0 or full > done):
                enter_row(c, request, group, row, done, full, tail, where)
            if c.config.states and group.kind == Kind.STATE:
                for column in range(done, full):
                    block = at_column(group, row, column)
                    if block is not None:
                        entry = primary(c, block)
                        if entry is not None:
                            entry.fresh = c.step
                            if c.config.offering and group.offered:
                                offer(c, group, request, block, entry)


def enter_row(c: Cache, request: Request, group: Group, row: Row, done: int, full: int, tail: int, where: int) -> None:
    """Registers full columns from `done` up to `full`, and a tail of so many tokens in column `where`."""
    size, hash, kept = group.size, c.config.hash, kept_of(c, request, group)
    for turn in range(done, full + (tail > 0)):
        column, end, part = turn, (turn + 1) * group.scale, 0
        is_tail = (c.config.parts > 1 or c.config.states) and turn == full
        if is_tail:
            column, end, part = where, tail // hash, tail % size // hash
        block, enters = at_column(group, row, column), False
        entry = entry_of(c, request, group, end - 1)
        if block is not None:
            if is_tail:
                enters = enter_tail(c, request, group, row, block, column, entry, part)
            elif retained(column, kept) and not stands(c, row, column):
                clause("register/full", "BlockPool.cache_full_blocks", "filled blocks are registered")
                if c.config.parts > 1 or c.config.exporting:
                    drop_keys(c, block, NONE)
                register(c, block, 0, entry)
            else:
                note(c, entry, Fate.NOT_RETAINED)
            grows = request.grant_step == c.step and column >= request.granted // size
            if c.config.partial and group.kind == Kind.FULL and grows:
                block.stamp = c.step
                block.written = 0 if request.joined else max(0, request.granted - column * size)
        elif not is_tail:
            note(c, entry, Fate.RETIRED)
        if c.config.exporting and not is_tail:
            row.stands[column] = 0
        if turn == full - 1:
            tell_stored(c, request, group, done * size, full * size, size)
        elif enters:
            tell_stored(c, request, group, (end - 1) * hash, end * hash, hash)


def of_span(c: Cache, request: Request, group: Group, row: Row, done: int, full: int) -> None:
    """Names what is retained of the columns that are looked at, and that nothing is."""
    kept, count = kept_of(c, request, group), 0
    for column in range(done, full):
        if at_column(group, row, column) is not None and retained(column, kept) and not stands(c, row, column):
            count += 1
    if count == 0:
        clause("register/nothing", "BlockPool.cache_full_blocks", "a span is looked at and nothing of it is registered")
    elif count < full - done:
        clause("register/skipped", "BlockPool.cache_full_blocks", "a span is registered without all of its blocks")
    if c.config.interval == 0:
        clause("retention/last-only", "replay_boundaries", "only the last replay boundary is retained")
    if c.config.interval > 0:
        clause("retention/interval", "replay_boundaries", "boundaries at an interval are retained")


def stands(c: Cache, row: Row, column: int) -> bool:
    """True if a column holds another state than the one at its end: one inside the chunk, or its beginning."""
    return bool(c.config.exporting) and (row.stands[column] > 0 or (row.planned > 0 and row.begun == column + 1))


def enter_tail(
    c: Cache, request: Request, group: Group, row: Row, block: Block, column: int, entry: Entry, part: int
) -> bool:
    """Registers a block under the key of a prompt's tail, or of a state; True if it was not found by it before.

    Keys that cover less are dropped; beside one that covers more it is a further one. A state that a chunk left behind
    has no other key.
    """
    known, longer = block.known[part] is entry, False
    if c.config.parts > 1 and part > 0 and block.names > 0:
        longer = block.known[0] is not None
        for other in range(part + 1, c.config.parts):
            if block.known[other] is not None:
                longer = True
    state = c.config.states and group.kind == Kind.STATE
    exported = c.config.exporting and state and row.planned > 0
    drops, enters, again = not known and not longer, not known, longer or not known or c.config.again
    if exported:
        clause("register/checkpoint", "MambaManager.cache_blocks", "a state that a chunk left behind is registered")
        serving, beyond = serves(c, request, group, row.planned), row.planned > request.keys * c.config.hash
        again = longer or not known
        if serving and again and beyond and c.defects.checkpoint_beyond_keys:
            clause("checkpoint-beyond-keys", "MambaManager._cache_partial_tail_block", "defect: a key is not there")
            c.failed = Failure.CHECKPOINT
        enters = serving and again and not beyond
        again, drops = enters, enters or not serving
    if drops:
        drop_keys(c, block, NONE)
    if enters:
        if part > 0:
            clause("register/partial", "BlockPool.cache_partial_block", "an entry inside a block is registered")
        register(c, block, part, entry)
    if state and again:
        entry.fresh = c.step
        if part > 0 and not exported:
            row.shared, row.looked = column + 1, column
            if c.config.offering:
                row.tail, row.tail_block, row.tail_end = entry, block, column * group.size + part * c.config.hash
    return enters


# ------------------------------------------------------------------ tails


def tail_of(c: Cache, request: Request, group: Group, row: Row, tokens: int) -> tuple[int, int]:
    """A length at which a prompt could be resumed inside a block, or from a state, and its column; 0 for none."""
    tail, where, hash = 0, 0, c.config.hash
    if group.kind == Kind.FULL and group.scale > 1:
        tail = min((request.prompt - 1 + group.drops) // hash, request.keys) * hash
        where = tail // group.size
        if tail > min(tokens, request.keys * hash) or tail % group.size == 0 or where >= row.length:
            tail = 0
    if c.config.states and group.kind == Kind.STATE:
        where = ceil(tokens, group.size) - 1
        ends = tokens == resumable(c, request.prompt, hash)
        if c.config.branches and tokens == request.branch and request.computed < tokens and tokens <= request.prompt:
            clause("mamba/branch", "MambaManager.cache_blocks", "a state is kept where others branch off")
            ends = True
        if ends and tokens > 0 and tokens % hash == 0 and where < row.length:
            tail = tokens
        if c.config.exporting and row.planned > 0:
            tail, where = row.planned, row.planned_at
            if c.defects.plan_outlives_refusal and where >= row.length:
                clause("plan-outlives-refusal", "MambaManager", "defect: what was planned for a refused chunk stays")
                c.failed, tail = Failure.COLUMN, 0
    return tail, where


def serves(c: Cache, request: Request, group: Group, position: int) -> bool:
    """True if a request can resume at a state that a chunk left behind."""
    every, end = c.config.interval == DENSE, position // group.size
    if c.config.interval > 0:
        every = end % max(c.config.interval // group.size, 1) == 0
    if every and position % group.size == 0:
        return True
    return position in (resumable(c, request.prompt, c.config.alignment), request.branch)


# ------------------------------------------------------------------ retention


def kept_of(c: Cache, request: Request, group: Group) -> tuple[int, int, int, int, int, int, int]:
    """Columns of a group that are worth registering, for `retained`: the last `need` of each `period` columns, from
    `shift` on, and as many before each of four columns.

    Where retention is sparse these are the lengths at which a repeated prompt would resume, which is shorter by a
    scheduler block under the EAGLE drop, counted from the prompt without and with its last token; and where others
    branch off.
    """
    clause("retained", "SlidingWindowManager.reachable_block_mask")
    window, interval = group.kind == Kind.WINDOW, c.config.interval
    if not window and (group.kind != Kind.STATE or interval == DENSE):
        return 1, 1, 0, 0, 0, 0, 0
    if window and c.config.alignment % group.size > 0:
        return 1, 1, 0, 0, 0, 0, 0
    shift = group.drops if window else 0
    need = group.need + shift if window else 1
    segment = c.config.alignment if interval == DENSE else interval
    period = segment // group.size if segment > 0 else UNBOUNDED
    if interval == DENSE:
        return period, need, shift, 0, 0, 0, 0
    last, end = request.prompt - 1, request.prompt - 1
    if c.config.eagle:
        grid = c.config.grid
        last, end = max(last // grid - 1, 0) * grid, max(request.prompt // grid - 1, 0) * grid
    branch = request.branch if request.branch > 0 else last
    below = last
    if c.config.below and group.drops and request.branch >= group.size:
        below = branch - group.size
    return (
        period,
        need,
        shift,
        stop_of(c, group, shift, last),
        stop_of(c, group, shift, end),
        stop_of(c, group, shift, branch),
        stop_of(c, group, shift, below),
    )


def stop_of(c: Cache, group: Group, shift: int, length: int) -> int:
    """The column behind those that a hit of a length reads."""
    return length // c.config.alignment * c.config.alignment // group.size + shift


def retained(column: int, kept: tuple[int, int, int, int, int, int, int]) -> bool:
    """True if the block of a column is worth registering."""
    period, need, shift, last, end, branch, below = kept
    found = need >= period or (column >= shift and (column - shift) % period >= period - need)
    for stop in (last, end, branch, below):
        if stop > 0 and stop - need <= column and column < stop:
            found = True
    return found

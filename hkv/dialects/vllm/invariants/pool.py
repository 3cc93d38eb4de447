"""Every block is accounted for: free or referenced, owned by whom, null or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hkv.dialects.vllm.invariants.arrays import FAR, ArrayMoment, Wrong, array_invariant
from hkv.dialects.vllm.invariants.moment import Moment, Snapshot, invariant
from hkv.dialects.vllm.log import structs as oplog

# A state says something: what it names exists, and rows are those of requests that run.


@invariant("form", "B-I16", "B-I32")
def form(moment: Moment) -> Iterator[str]:
    """Blocks, groups and requests that a state names exist; who runs has a row in every group, and nobody else has any.

    Holds after every operation. No exception; a row may be empty in some group, `opaque` or not, but not in all. The
    null block has no key.
    """
    after, config = moment.after, moment.config
    groups = len(config.topology.groups)
    named = {*after.free, *after.refs, *after.cached, *after.owners}
    if strange := sorted(block for block in named if not 0 <= block < config.num_blocks):
        yield f"there are no blocks {strange}"
    for block, (group, tokens, _) in after.cached.items():
        if not block:
            yield f"the null block is cached as {tokens} tokens of group {group}, though it holds none"
        if not 0 <= group < groups or tokens < 1:
            yield f"block {block} is cached as {tokens} tokens of group {group}, of {groups} groups"
    running = {id for id, record in moment.ledger.requests.items() if record.running}
    for id in sorted(running ^ after.rows.keys()):
        yield (
            f"{id} was granted blocks, and holds none"
            if id in running
            else f"{id} does not run, and holds {after.rows[id]}"
        )
    for id, rows in after.rows.items():
        if len(rows) != groups:
            yield f"{id} has {len(rows)} rows in {groups} groups"


@array_invariant("conservation", "B-I1", needs=("references",))
def conservation(m: ArrayMoment) -> Iterator[Wrong]:
    """Free and referenced blocks are all blocks but the null block, each in one of the two states, queued once.

    Holds after every operation. No exception: a cached block is free or referenced like any other. What the engine
    counts as free (`num_free`, where it says so) is the length of the queue.
    """
    after, queued, refs = m.after, m.after.queued, m.after.refs
    yield (
        after.num_free != after.free,
        lambda: f"{after.num_free} blocks are counted as free, and {after.free} are in the queue",
    )
    yield queued > 1, lambda block: f"block {block} is queued {queued[block]} times"
    yield (queued > 0) & (refs != 0), lambda block: f"block {block} is queued and has {refs[block]} references"
    yield refs < 0, lambda block: f"block {block} has {refs[block]} references"
    missing = m.real & (queued == 0) & (refs == 0)
    yield missing, lambda _: f"blocks {missing.nonzero()[0].tolist()} are neither free nor referenced"


@array_invariant("references", "B-I2", "B-I38", needs=("references",))
def references(m: ArrayMoment) -> Iterator[Wrong]:
    """A block has one reference for each place in a row, and one for each end of a pending copy.

    Holds after every operation. Exception: where a Mamba group's block is larger than the hash block, states may be
    copied, and pending copies are only known when they are drained. Between two `copies`, a block may have more
    references than places: request r adopts a hit of 6 tokens in blocks of 4; its second block is copied, so the source
    has one reference and no place, the target two and one. After `copies` the counts agree, and what it drained is what
    had been too many. That the cache makes no hits inside blocks does not help: an owner's copy may be made even so.
    """
    spare, copying = m.spare(m.after), m.may(oplog.CopiesOp)
    said = lambda picture: picture.snapshot.spare()  # noqa: E731
    yield spare < 0, lambda _: f"rows name blocks more often than they are referenced: {said(m.after)}"
    if copying or not m.copies_states:
        yield spare != 0, lambda _: f"references that no row and no pending copy explains: {said(m.after)}"
    if copying and m.told is not None:
        ends = m.told != m.spare(m.before)
        held = "and the references that pending copies hold are of blocks"
        yield ends, lambda _: f"copies {m.answer} are told, {held} {said(m.before)}"


@array_invariant("ownership", "B-I3")
def ownership(m: ArrayMoment) -> Iterator[Wrong]:
    """A block that several places name is the same filled block of the same prefix: same group, same column.

    Holds after every operation, also when `evict` has taken the key of a shared block; a shared block that is only
    partly filled is copied in the very `allocate` that adopts it. Exception: a Mamba checkpoint inside a chunk stands
    in a column of its own: of 21 tokens in blocks of 4 the state after 16 is in column 4, for those who hit it in 3.
    """
    rows, groups = m.after.rows, m.groups
    shared = m.take(m.places(rows) > 1, rows) & (rows > 0)
    tokens = m.take(m.after.tokens, rows)
    apart = groups.apart[:, None] & (tokens > 0)
    ends = m.xp.where(apart, tokens, (m.columns(m.after) + 1) * groups.sizes[:, None])
    spots = m.xp.where(apart, -1, m.columns(m.after)) + rows.shape[2] * np.arange(len(groups.sizes))[:, None]
    scattered = m.differ(rows, spots, shared)
    yield scattered, lambda block: f"block {block} is at several places: {m.after.snapshot.owners[block]}"
    names = m.prefixes(ends, shared)
    other = m.differ(rows, names, shared) | (m.places(m.xp.where(shared & (names < 0), rows, 0)) > 0)
    yield (
        other,
        lambda block: (
            f"block {block} is shared by requests whose first {ends[rows == block][0]} tokens differ:"
            f" {m.after.snapshot.owners[block]}"
        ),
    )
    for problem in _adopted_inside(m.moment) if m.moment else ():
        yield np.True_, lambda problem=problem: problem


def _adopted_inside(moment: Moment) -> Iterator[str]:
    """Blocks inside which the hit of the request just admitted ends, and in which it goes on itself."""
    operation = moment.operation
    if not isinstance(operation, oplog.AllocateOp) or not operation.hit or operation.external:
        return
    for group, row in enumerate(moment.after.rows.get(operation.id, [])):
        column, inside = divmod(operation.hit, moment.config.block_size(group))
        block = row[column] if inside and column < len(row) else 0
        entry = moment.before.cached.get(block)
        if entry is None or entry[0] != group or moment.after.cached.get(block) != entry:
            continue
        # A block out of the queue may get the very key again that it lost as it was handed out.
        if not _obtained(moment, group, block):
            yield f"{operation.id} goes on inside block {block} of group {group}, which its hit shares, without a copy"


@array_invariant("null block", "B-I4")
def null_block(m: ArrayMoment) -> Iterator[Wrong]:
    """Block 0 is never queued, referenced, cached or copied, and stands only where a group has no use for a block.

    Holds after every operation, for rows and hits. Exceptions are kinds, not moments: sliding-window and chunked rows
    have it before the window or chunk, Mamba rows anywhere; a full-attention row never, nor the sinks of a row.
    """
    after, never_read = m.after, m.outgrown(FAR, m.width)
    named = (after.queued[0] > 0) | (after.refs[0] != 0) | after.cached[0]
    yield named, lambda: "block 0 is queued, referenced or cached"
    if m.may(oplog.CopiesOp) and m.told is not None:
        yield m.told[0] > 0, lambda: f"block 0 is copied: {m.answer}"
    wrong = "whose tokens are always read"
    missing = (after.rows == 0) & (m.columns(after) < after.lengths[:, :, None]) & ~never_read
    yield missing, lambda row, group, at: f"row {group} of {m.names[row]} has block 0 at {at}, {wrong}"
    if m.may(oplog.LookupOp, oplog.ConnectorLookupOp):
        gap = (m.found == 0) & (np.arange(m.found.shape[1]) < m.covered[:, None]) & ~never_read
        yield (
            m.does(oplog.LookupOp, oplog.ConnectorLookupOp) & gap,
            lambda group, at: f"row {group} of the hit has block 0 at {at}, {wrong}",
        )


def _obtained(moment: Moment, group: int, block: int) -> bool:
    """True if the operation answers that it took the block out of the queue."""
    blocks = moment.answer.blocks if isinstance(moment.answer, oplog.Allocation) else None
    return blocks is not None and group < len(blocks) and block in blocks[group]


# The order of the free queue, and what giving back means.

KEEPING = (oplog.StepOp, oplog.RequestOp, oplog.LookupOp, oplog.AdvanceOp, oplog.AppendOp, oplog.CommitOp)
OTHERS = (oplog.DropOp, oplog.EvictOp, oplog.ResetOp, oplog.EventsOp, oplog.StateOp)
LIVE = (oplog.ComputedOp, oplog.DigestOp, oplog.EndOp, *oplog.CONNECTOR_OPERATIONS)
RESTING = KEEPING + OTHERS + LIVE
"""Operations that hand out and take back no block."""


@array_invariant("eviction order", "B-I33", needs=("order", "references"))
def eviction_order(m: ArrayMoment) -> Iterator[Wrong]:
    """Blocks are handed out from the front; blocks without a key come back to the front, cached ones to the back.

    So never-cached blocks are reused first, cached ones in the order in which they were last used; within a request the
    deeper block goes first, group by group. Holds after every operation: the order is computed anew from the queue
    before. Exceptions: Mamba rows retire in two strokes, so of several Mamba blocks retired by one `allocate` only the
    set is compared; `copies` gives back blocks in an order of its own, so only the others' order is. Example: `full:4`
    and `swa:4:4`, 18 tokens in blocks 1 to 5 and 6 to 10: freeing both leaves 10, 5, ..., 4, 3, 2, 1, 9, 8, 7, 6.
    """
    before, after = m.before, m.after
    went = lambda *_: f"the queue went from {before.snapshot.free} to {after.snapshot.free}"  # noqa: E731
    if m.may(*RESTING):
        moved = (before.place != after.place) | (before.free != after.free)
        yield m.does(*RESTING) & moved, went
    if m.may(oplog.FreeOp):
        given = _given_back(m, m.mine(before.rows))
        yield (
            m.does(oplog.FreeOp) & (_differs(m, given) | (m.xp.sum(given < FAR) != after.free)),
            lambda: f"the queue is {after.snapshot.free}, not {_in_order(given)}",
        )
    if m.may(oplog.AllocateOp):
        old, new = m.mine(before.rows), m.mine(after.rows)
        common = m.columns(after) < m.mine(after.lengths)[:, None]
        outgrown = common & (old > 0) & (old != new) & m.take(m.places(new) == 0, old)
        # Blocks of the queue that a hit took out of its middle: with the same key as before, and in use.
        same = before.cached & (after.entry == before.entry)
        adopted = (before.queued > 0) & same & (after.refs > 0) & (m.adopted > 0)
        given = m.xp.where(adopted, FAR, _given_back(m, m.xp.where(outgrown, old, 0)))
        strokes = m.xp.any(outgrown) & bool(m.groups.snapshot.any())
        short = m.xp.sum(given < FAR) < after.free
        yield (
            m.does(oplog.AllocateOp) & (short | (_differs(m, given) & ~strokes)),
            lambda: f"the queue is {after.snapshot.free}, not the end of {_in_order(given)}",
        )
    for problem in _other_orders(m.moment) if m.moment else ():
        yield np.True_, lambda problem=problem: problem


def _given_back(m: ArrayMoment, cells: Any) -> Any:
    """int[B]: places in the queue after `cells`, int[G, W], were given back group by group, the last column first.

    The smaller, the nearer to the front, from below 0 on; `FAR` for blocks that do not come back. vLLM frees a row in
    reverse (`SingleTypeKVCacheManager.free`), so that a prefix outlives what follows it, and puts what has no key at
    the front (`BlockPool.free_blocks`): a later group's come before an earlier one's, and in each the deepest first.
    """
    groups, width = cells.shape
    depth = width - 1 - np.arange(width)
    front = -(np.arange(groups)[:, None] + 1) * width + depth
    back = m.config.num_blocks + np.arange(groups)[:, None] * width + depth
    named = m.places(cells)
    place = m.xp.where(m.before.cached, m.most(cells, back), m.most(cells, front))
    return m.xp.where((named > 0) & (m.before.refs == named), place, m.before.place)


def _differs(m: ArrayMoment, given: Any) -> Any:
    """True if the queue is not the end of the one that these places describe."""
    stands, rank = given < FAR, m.rank(given)
    taken = m.xp.sum(stands) - m.after.free
    wanted = m.xp.where(stands & (rank >= taken), rank - taken, -1)
    return (taken < 0) | m.xp.any(wanted != m.xp.where(m.after.queued > 0, m.after.place, -1))


def _in_order(given: np.ndarray) -> list[int]:
    order = np.argsort(given, kind="stable")
    return order[given[order] < FAR].tolist()


def _other_orders(moment: Moment) -> Iterator[str]:
    """Problems of operations that no explorer performs."""
    before, after, operation = moment.before, moment.after, moment.operation
    if isinstance(operation, oplog.ReleaseOp):
        wanted = _released(before, operation.blocks)
        if after.free != wanted:
            yield f"the queue is {after.free}, not {wanted}"
    elif isinstance(operation, oplog.HoldOp | oplog.PopOp):
        held = set(operation.blocks) if isinstance(operation, oplog.HoldOp) else set()
        if after.free != [block for block in before.free if block not in held]:
            yield f"the queue went from {before.free} to {after.free}"
    elif isinstance(operation, oplog.CopiesOp):
        kept = [block for block in after.free if block in set(before.free)]
        if kept != before.free:
            yield f"the queue went from {before.free} to {after.free}"


def _released(before: Snapshot, blocks: Iterable[int]) -> list[int]:
    """The queue after blocks were given back in this order."""
    refs, unknown, known = dict(before.refs), [], []
    for block in filter(None, blocks):
        refs[block] = refs.get(block, 0) - 1
        if refs[block] == 0:
            (known if block in before.cached else unknown).append(block)
    return unknown + before.free + known


@array_invariant("release", "B-I32", after=(oplog.FreeOp, oplog.DropOp, oplog.ResetOp), needs=("references",))
def release(m: ArrayMoment) -> Iterator[Wrong]:
    """A request that leaves keeps no row and no reference, and changes no other: only its cached blocks remain.

    Holds after `free`, `drop` and `reset`. A finished and a preempted request are freed alike, and one that comes back
    under the same id starts from an empty row. `reset` succeeds exactly when nothing is referenced, and then no key is
    left. Exception: pending copies keep their references after the request is freed, until `copies`.
    """
    before, after = m.before, m.after
    if m.may(oplog.ResetOp):
        reset, used, free = m.does(oplog.ResetOp), before.refs != 0, before.free
        said = "blocks in use"
        yield (
            reset & (m.granted == m.xp.any(used)),
            lambda: f"reset answered {m.granted} with {used.sum()} {said}, {free} in the queue",
        )
        yield (
            reset & m.granted & after.cached,
            lambda _: f"blocks {after.cached.nonzero()[0].tolist()} are still cached",
        )
    if not m.may(oplog.FreeOp, oplog.DropOp):
        return
    leaves, spare = m.does(oplog.FreeOp, oplog.DropOp), m.spare(before) != m.spare(after)
    yield leaves & (m.mine(after.lengths) > 0), lambda _: f"{m.id} still has {m.after.snapshot.rows[m.id]}"
    yield leaves & m.others_changed(), lambda: "somebody else's row changed"
    pictures = before, after
    said = "references beside those of rows went from"
    yield leaves & spare, lambda _: f"{said} {' to '.join(str(each.snapshot.spare()) for each in pictures)}"


@invariant("bystanders", "B-I2", "B-I32")
def bystanders(moment: Moment) -> Iterator[str]:
    """An operation changes nobody's row but its own request's, and most change no row and no reference at all.

    Holds after every operation: only `allocate`, `retire`, `free` and `pop` change rows, only they but `pop`, and
    `copies`, `hold` and `release`, references. No exception: blocks that a request outgrew leave its row when it
    asks for more itself.
    """
    before, after, operation = moment.before, moment.after, moment.operation
    changes = oplog.AllocateOp | oplog.FreeOp | oplog.RetireOp | oplog.PopOp
    own = getattr(operation, "id", None) if isinstance(operation, changes) else None
    for id in sorted(before.rows.keys() | after.rows.keys()):
        old, new = before.rows.get(id), after.rows.get(id)
        if id != own and old != new:
            yield f"the row of {id} went from {old} to {new}"
    if isinstance(operation, (*RESTING, oplog.PopOp)) and before.refs != after.refs:
        yield f"references went from {before.refs} to {after.refs}"

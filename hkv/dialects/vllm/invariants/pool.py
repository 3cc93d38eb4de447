"""Every block is accounted for: free or referenced, owned by whom, null or not."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, Snapshot, invariant
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import copies_states

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


FAR = 1 << 20
"""More tokens than any request has."""


@invariant("conservation", "B-I1", needs=("references",))
def conservation(moment: Moment) -> Iterator[str]:
    """Free and referenced blocks are all blocks but the null block, each in one of the two states, queued once.

    Holds after every operation. No exception: a cached block is free or referenced like any other. What the engine
    counts as free (`num_free`, where it says so) is the length of the queue.
    """
    after = moment.after
    if after.num_free not in (None, len(after.free)):
        yield f"{after.num_free} blocks are counted as free, and {len(after.free)} are in the queue"
    queued = collections.Counter(after.free)
    for block, times in queued.items():
        if times > 1:
            yield f"block {block} is queued {times} times"
        if block in after.refs:
            yield f"block {block} is queued and has {after.refs[block]} references"
    for block, count in after.refs.items():
        if count < 0:
            yield f"block {block} has {count} references"
    missing = set(range(1, moment.config.num_blocks)) - queued.keys() - after.refs.keys()
    if missing:
        yield f"blocks {sorted(missing)} are neither free nor referenced"


@invariant("references", "B-I2", "B-I38", needs=("references",))
def references(moment: Moment) -> Iterator[str]:
    """A block has one reference for each place in a row, and one for each end of a pending copy.

    Holds after every operation. Exception: where a Mamba group's block is larger than the hash block, states may be
    copied, and pending copies are only known when they are drained. Between two `copies`, a block may have more
    references than places: request r adopts a hit of 6 tokens in blocks of 4; its second block is copied, so the source
    has one reference and no place, the target two and one. After `copies` the counts agree, and what it drained is what
    had been too many. That the cache makes no hits inside blocks does not help: an owner's copy may be made even so.
    """
    copying = copies_states(moment.config)
    spare = moment.after.spare()
    if any(count < 0 for count in spare.values()):
        yield f"rows name blocks more often than they are referenced: {spare}"
    if spare and (not copying or isinstance(moment.operation, oplog.CopiesOp)):
        yield f"references that no row and no pending copy explains: {spare}"
    if isinstance(moment.operation, oplog.CopiesOp) and isinstance(moment.answer, list):
        ends = collections.Counter(block for copy in moment.answer if isinstance(copy, tuple | list) for block in copy)
        if dict(ends) != moment.before.spare():
            held = moment.before.spare()
            yield f"copies {moment.answer} are told, and the references that pending copies hold are of blocks {held}"


@invariant("ownership", "B-I3")
def ownership(moment: Moment) -> Iterator[str]:
    """A block that several places name is the same filled block of the same prefix: same group, same column.

    Holds after every operation, also when `evict` has taken the key of a shared block; a shared block that is only
    partly filled is copied in the very `allocate` that adopts it. Exception: a Mamba checkpoint inside a chunk stands
    in a column of its own: of 21 tokens in blocks of 4 the state after 16 is in column 4, for those who hit it in 3.
    """
    for block, owners in moment.after.owners.items():
        if len(owners) == 1:
            continue
        _, group, column = owners[0]
        end = (column + 1) * moment.config.block_size(group)
        entry = moment.after.cached.get(block)
        if entry is not None and _stands_apart(moment.config, group):
            end, apart = entry[1], any(owner[1] != group for owner in owners)
        else:
            apart = any(owner[1:] != (group, column) for owner in owners)
        if apart:
            yield f"block {block} is at several places: {owners}"
        elif len(names := {moment.ledger.prefix(id, end) for id, _, _ in owners}) != 1 or None in names:
            yield f"block {block} is shared by requests whose first {end} tokens differ: {owners}"
    yield from _adopted_inside(moment)


def _stands_apart(config: VllmConfig, group: int) -> bool:
    """True if a group's states may be of other lengths than their columns' ends: exported, or kept inside blocks."""
    spec = config.topology.groups[group].spec
    inside = config.block_size(group) > config.hash_block_size
    return spec.snapshot and (inside or kinds.layer(spec).checkpoint_blocks > 0)


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


@invariant("null block", "B-I4")
def null_block(moment: Moment) -> Iterator[str]:
    """Block 0 is never queued, referenced, cached or copied, and stands only where a group has no use for a block.

    Holds after every operation, for rows and hits. Exceptions are kinds, not moments: sliding-window and chunked rows
    have it before the window or chunk, Mamba rows anywhere; a full-attention row never, nor the sinks of a row.
    """
    after = moment.after
    if 0 in after.free or 0 in after.refs or 0 in after.cached:
        yield "block 0 is queued, referenced or cached"
    if isinstance(moment.operation, oplog.CopiesOp) and any(0 in copy for copy in moment.answer or ()):  # type: ignore
        yield f"block 0 is copied: {moment.answer}"
    rows = dict(after.rows)
    if isinstance(moment.answer, oplog.Hit):
        rows["the hit"] = moment.answer.blocks
    for id, groups in rows.items():
        for group, row in enumerate(groups):
            spec = moment.config.topology.groups[group].spec
            never = kinds.layer(spec).retired(FAR, moment.config.block_size(group))
            if wrong := [column for column, block in enumerate(row) if block == 0 and column not in never]:
                yield f"row {group} of {id} has block 0 at {wrong[0]}, whose tokens are always read"


def _obtained(moment: Moment, group: int, block: int) -> bool:
    """True if the operation answers that it took the block out of the queue."""
    blocks = moment.answer.blocks if isinstance(moment.answer, oplog.Allocation) else None
    return blocks is not None and group < len(blocks) and block in blocks[group]


# The order of the free queue, and what giving back means.

KEEPING = (oplog.StepOp, oplog.RequestOp, oplog.LookupOp, oplog.AdvanceOp, oplog.AppendOp, oplog.CommitOp)
OTHERS = (oplog.DropOp, oplog.EvictOp, oplog.ResetOp, oplog.EventsOp, oplog.StateOp)
LIVE = (oplog.ComputedOp, oplog.DigestOp, oplog.EndOp, oplog.ConnectorOperation)
RESTING = KEEPING + OTHERS + LIVE
"""Operations that hand out and take back no block."""


@invariant("eviction order", "B-I33", needs=("order", "references"))
def eviction_order(moment: Moment) -> Iterator[str]:
    """Blocks are handed out from the front; blocks without a key come back to the front, cached ones to the back.

    So never-cached blocks are reused first, cached ones in the order in which they were last used; within a request the
    deeper block goes first, group by group. Holds after every operation: the order is computed anew from the queue
    before. Exceptions: Mamba rows retire in two strokes, so of several Mamba blocks retired by one `allocate` only the
    set is compared; `copies` gives back blocks in an order of its own, so only the others' order is. Example: `full:4`
    and `swa:4:4`, 18 tokens in blocks 1 to 5 and 6 to 10: freeing both leaves 10, 5, ..., 4, 3, 2, 1, 9, 8, 7, 6.
    """
    before, after, operation = moment.before, moment.after, moment.operation
    if isinstance(operation, RESTING):
        if before.free != after.free:
            yield f"the queue went from {before.free} to {after.free}"
    elif isinstance(operation, oplog.FreeOp):
        wanted = _released(before, before.free, operation.id, before.rows.get(operation.id, []))
        if after.free != wanted:
            yield f"the queue is {after.free}, not {wanted}"
    elif isinstance(operation, oplog.ReleaseOp):
        wanted = _released(before, before.free, "", [operation.blocks[::-1]])
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
    elif isinstance(operation, oplog.AllocateOp):
        yield from _allocated(moment, operation)


def _allocated(moment: Moment, operation: oplog.AllocateOp) -> Iterator[str]:
    before, after = moment.before, moment.after
    old, new = before.rows.get(operation.id, []), after.rows.get(operation.id, [])
    outgrown = [
        [
            block if block and block != now and _gone(block, after, operation.id) else 0
            for block, now in zip(*pair, strict=False)
        ]
        for pair in zip(old, new, strict=False)
    ]
    queue = _released(before, before.free, operation.id, outgrown)
    queue = [block for block in queue if block not in _adopted(moment, operation)]
    taken = len(queue) - len(after.free)
    strokes = any(spec.snapshot for spec in moment.config.topology.specs) and sum(map(any, outgrown)) > 0
    same = sorted(queue[taken:]) == sorted(after.free) if strokes else queue[taken:] == after.free
    if taken < 0 or (not same and not strokes):
        yield f"the queue is {after.free}, not the end of {queue}"


def _gone(block: int, after: Snapshot, id: str) -> bool:
    return all(owner != id for owner, _, _ in after.owners.get(block, ()))


def _adopted(moment: Moment, operation: oplog.AllocateOp) -> set[int]:
    """Blocks of the queue that a hit took out of its middle: cached before, with the same key now, and in use."""
    before, after = moment.before, moment.after
    if not operation.hit:
        return set()
    kept = {block for block in before.free if block in before.cached and block in after.refs}
    return {block for block in kept if after.cached.get(block) == before.cached[block]}


def _released(before: Snapshot, queue: Iterable[int], id: str, rows: Iterable[Iterable[int]]) -> list[int]:
    """The queue after `rows` were given back group by group, the last column first."""
    order, refs = list(queue), dict(before.refs)
    for row in rows:
        unknown, known = [], []
        for block in reversed(list(row)):
            if block:
                refs[block] = refs.get(block, 0) - 1
                if refs[block] == 0:
                    (known if block in before.cached else unknown).append(block)
        order = unknown + order + known
    return order


@invariant("release", "B-I32", after=(oplog.FreeOp, oplog.DropOp, oplog.ResetOp), needs=("references",))
def release(moment: Moment) -> Iterator[str]:
    """A request that leaves keeps no row and no reference, and changes no other: only its cached blocks remain.

    Holds after `free`, `drop` and `reset`. A finished and a preempted request are freed alike, and one that comes back
    under the same id starts from an empty row. `reset` succeeds exactly when nothing is referenced, and then no key is
    left. Exception: pending copies keep their references after the request is freed, until `copies`.
    """
    before, after, operation = moment.before, moment.after, moment.operation
    if isinstance(operation, oplog.ResetOp):
        ok = isinstance(moment.answer, oplog.Reset) and moment.answer.ok
        if ok != (not before.refs):
            yield f"reset answered {ok} with {len(before.refs)} blocks in use, {len(before.free)} in the queue"
        if ok and after.cached:
            yield f"blocks {sorted(after.cached)} are still cached"
        return
    assert isinstance(operation, oplog.FreeOp | oplog.DropOp)
    if operation.id in after.rows:
        yield f"{operation.id} still has {after.rows[operation.id]}"
    if {id: row for id, row in before.rows.items() if id != operation.id} != after.rows:
        yield "somebody else's row changed"
    if before.spare() != after.spare():
        yield f"references beside those of rows went from {before.spare()} to {after.spare()}"


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

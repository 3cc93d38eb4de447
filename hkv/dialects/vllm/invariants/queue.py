"""The order of the free queue, and what giving back means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hkv.dialects.vllm.invariants.moment import Moment, Snapshot, invariant
from hkv.dialects.vllm.log import structs as oplog

KEEPING = (oplog.StepOp, oplog.RequestOp, oplog.LookupOp, oplog.AdvanceOp, oplog.AppendOp, oplog.CommitOp)
OTHERS = (oplog.DropOp, oplog.EvictOp, oplog.ResetOp, oplog.EventsOp, oplog.StateOp)
LIVE = (oplog.ComputedOp, oplog.DigestOp, oplog.EndOp, *oplog.CONNECTOR_OPERATIONS)
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

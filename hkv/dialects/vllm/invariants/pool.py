"""Every block is accounted for: free or referenced, owned by whom, null or not."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import copies_states

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
    return spec.snapshot and (inside or spec.checkpoint_blocks > 0)


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
            never = spec.retired(FAR, moment.config.block_size(group))
            if wrong := [column for column, block in enumerate(row) if block == 0 and column not in never]:
                yield f"row {group} of {id} has block 0 at {wrong[0]}, whose tokens are always read"


def _obtained(moment: Moment, group: int, block: int) -> bool:
    """True if the operation answers that it took the block out of the queue."""
    blocks = moment.answer.blocks if isinstance(moment.answer, oplog.Allocation) else None
    return blocks is not None and group < len(blocks) and block in blocks[group]

"""Invariants of the second tier, asked of its whole state after every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hkv.contract.invariant import PlainMoment, Register
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import SIMPLE

INVARIANTS = Register(structs.OFFLOAD)


@INVARIANTS.invariant("chunks are somewhere")
def chunks_are_somewhere(moment: PlainMoment) -> Iterator[str]:
    """Each chunk that was handed out has one key, or is free, and in one place only."""
    if _is_simple(moment):
        return
    pool: structs.PoolState = moment.after.pool
    places = Counter([*pool.free, *(chunk.id for chunk in pool.chunks)])
    if twice := sorted(id for id, times in places.items() if times > 1):
        yield f"chunks {twice} are in two places"
    if lost := sorted(set(range(pool.handed_out)) - set(places)):
        yield f"chunks {lost} are nowhere"
    if beyond := sorted(id for id in places if id >= min(pool.handed_out, moment.header.num_blocks[-1])):
        yield f"chunks {beyond} were never handed out"


@INVARIANTS.invariant("keys are in one place")
def keys_are_in_one_place(moment: PlainMoment) -> Iterator[str]:
    """A key has one chunk; what ARC remembers as gone is not there, and no more than the tier has chunks."""
    if _is_simple(moment):
        return
    pool: structs.PoolState = moment.after.pool
    keys = Counter([chunk.key for chunk in pool.chunks] + [key for gone in pool.gone for key in gone])
    if twice := sorted(key for key, times in keys.items() if times > 1):
        yield f"keys {twice} are in two places"
    if any(len(gone) > moment.header.num_blocks[-1] for gone in pool.gone):
        yield f"{list(map(len, pool.gone))} keys are remembered as gone"


@INVARIANTS.invariant("no chunk leaves under a transfer")
def no_chunk_leaves_under_a_transfer(moment: PlainMoment) -> Iterator[str]:
    """A chunk that is read or written keeps its key and its chunk until its job is done, or the tier is emptied."""
    operation = moment.operation
    if (
        _is_simple(moment)
        or isinstance(operation, structs.ClearOp | structs.DoneOp)
        or getattr(operation, "tier", False)
    ):
        return
    after = {chunk.key: chunk.id for chunk in moment.after.pool.chunks}
    for chunk in moment.before.pool.chunks:
        evicted = _evicted(moment)
        if chunk.readers and after.get(chunk.key) != chunk.id and (evicted is None or chunk.key in evicted):
            yield f"chunk {chunk.id} of {chunk.key} left while it had {chunk.readers} readers"


@INVARIANTS.invariant("blocks of a transfer are held")
def blocks_of_a_transfer_are_held(moment: PlainMoment) -> Iterator[str]:
    """Of the simpler tier, no block that a store reads is free, and a block of the tier is free if nothing holds it."""
    if not _is_simple(moment):
        return
    after: structs.State = moment.after
    assert after.scheduler is not None
    if free := sorted(set(map(int, after.scheduler.fences)).intersection(after.scheduler.free)):
        yield f"blocks {free} are free while stores read them"
    idle = {chunk.id for chunk in after.pool.chunks if not chunk.readers}
    held = {chunk.id for chunk in after.pool.chunks} - idle
    if wrong := sorted(held.intersection(after.pool.free) | idle.difference(after.pool.free)):
        yield f"blocks {wrong} of the tier are held and free, or neither"


def _is_simple(moment: PlainMoment) -> bool:
    """True if the tier is a pool of blocks, which keep their keys while they are free, and may have the same one."""
    return moment.header.connector == SIMPLE


def _evicted(moment: PlainMoment) -> set[structs.Key] | None:
    """Keys that left in a step before its output was taken, None where it was none."""
    if not isinstance(moment.answer, structs.Stepped):
        return None
    stored = {key for event in moment.answer.events if not event.removed for key in event.keys}
    return {key for event in moment.answer.events if event.removed for key in event.keys} - stored


@INVARIANTS.invariant("no block is read after it was handed out")
def no_block_is_read_after_it_was_handed_out(moment: PlainMoment) -> Iterator[str]:
    """A block that a store reads is handed out only if the store is finished before the step."""
    if moment.after.scheduler is None or not isinstance(moment.answer, structs.Stepped):
        return
    written = {block for load in moment.answer.loads for block in load.blocks}
    for block, jobs in moment.before.scheduler.fences.items():
        if int(block) in written and (late := sorted(set(jobs) - set(moment.answer.flushed))):
            yield f"block {block} is loaded into while jobs {late} read it"

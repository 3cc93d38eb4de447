"""Rows are as long as they must be, and hold what can still be read, no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.arrays import ArrayMoment, HostMoment, Wrong, array_invariant, sentences
from hkv.dialects.vllm.invariants.moment import Moment, Snapshot, remembering
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import AllocateOp


@array_invariant("retirement", "B-I14", "B-I38", after=(AllocateOp,))
def retirement(m: ArrayMoment) -> Iterator[Wrong]:
    """A block has left the row if and only if no token still to be processed can read it.

    Holds after `allocate`, for the request it names: columns of which the query at its processed tokens reads
    nothing any more (`LayerSpec.retired`) are null, all others are not. Exceptions: a refused `allocate` may not
    have come to retiring yet, so columns may still be there; what is kept without being read a hit does not bring;
    Mamba rows have null columns between states too; chunks that do not start at blocks may begin with a hit that
    nobody looked at (`CHUNK_OFF_GRID`). 20 tokens of which 3 are in flight count as 17: a window of 8 in blocks of
    4 reads from token 10 on, columns 0 and 1 are null.
    """
    rows, processed = m.mine(m.after.rows), m.fact("processed")
    inside = m.columns(m.after) < m.mine(m.after.lengths)[:, None]
    gone = m.outgrown(processed, m.width)
    unread = m.outgrown(processed, m.width, kept=False)
    sizes = m.groups.sizes

    def still(group: int, _: int) -> str:
        end = (np.flatnonzero(gone[group] & inside[group])[-1] + 1) * sizes[group]
        left = rows[group][gone[group] & inside[group]].tolist()
        return f"group {group}{m.came} still has {left}, though nothing of it is read before token {end}"

    def lost(group: int, _: int) -> str:
        kept = rows[group][~unread[group] & inside[group]].tolist()
        return f"group {group}{m.came} has lost a block of {kept}, though all of its tokens are read"

    yield m.granted & gone & inside & (rows > 0), still
    judged = ~(m.groups.snapshot | m.groups.off_grid)[:, None]
    yield judged & ~unread & inside & (rows == 0), lost


@array_invariant("room", "B-I12", "B-I16", after=(AllocateOp,))
def room(m: ArrayMoment) -> Iterator[Wrong]:
    """A row has exactly the columns for the most tokens it was granted, look-ahead for drafts included.

    Holds after a granted `allocate`, for the request it names. Cross attention has columns for the most tokens of an
    encoder's output that were granted, and no others. Exceptions: `opaque` rows have one column always; Mamba
    rows keep drafts in `num_speculative_blocks` columns of their own, and with states at block ends (`align`) do not
    count look-ahead: 8 tokens and 3 of look-ahead in blocks of 4 are 3 columns of attention, 2 + 2 of such a Mamba.
    """
    groups, slots = m.groups, m.fact("slots")
    tokens = m.xp.where(groups.keeps_states, m.fact("main"), slots)
    columns = m.xp.where(
        groups.encoder_tokens, m.blocks_for(m.fact("encoder")), m.blocks_for(tokens) + groups.scratch_blocks
    )
    columns = m.xp.where(groups.one_block, 1, columns)
    lengths = m.mine(m.after.lengths)
    yield (
        m.granted & (lengths != columns),
        lambda group: f"group {group} has {lengths[group]} columns for {slots} tokens, not {columns[group]}",
    )


@array_invariant("admission", "B-I24", after=(AllocateOp,))
def admission(m: ArrayMoment) -> Iterator[Wrong]:
    """A refusal takes nothing, only what does not fit is refused, and a grant leaves free what was to stay free.

    Holds after `allocate`. Exceptions: a refused running request may have retired columns it outgrew: its row is
    the same but for more nulls. With Mamba groups, a grant to a running request or with tokens from elsewhere may
    use what is set aside, as the engine counts a state too few. A hit on a Mamba state, or inside a block, of this
    very step waits for the next, however much is free. Where the engine's estimate is a bound (Mamba rows; a hit,
    of which some blocks are in use and some are not; tokens from elsewhere; a request that must fit whole) a
    refusal is judged by whole rows: two groups with blocks of 4 and 20 free blocks take 20 tokens whatever the
    rest.
    """
    groups, waiting, mamba = m.groups, m.waiting, bool(m.groups.snapshot.any())
    free, spared = m.after.free, m.reserved + m.set_aside
    # vLLM counts a state too few where a running Mamba request grows, or tokens come from elsewhere.
    counted = (waiting & (m.external == 0)) | (not mamba)
    yield (
        m.granted & counted & (free < spared),
        lambda: f"granted, and {free} blocks are left free of {spared} set aside",
    )
    refused, old, new = ~m.granted, m.mine(m.before.rows), m.mine(m.after.rows)
    nulled = m.xp.all((new == old) | (new == 0)) & m.xp.all(m.mine(m.before.lengths) == m.mine(m.after.lengths))
    yield refused & (m.before.entry != m.after.entry), lambda _: "a refusal changed keys"
    yield refused & waiting & ~m.same(), lambda: "the refusal of a waiting request changed the cache"
    yield refused & ~waiting & m.others_changed(), lambda: "the refusal of a request changed others' rows"
    yield (
        refused & ~waiting & ~nulled,
        lambda: f"the refusal changed {m.before.snapshot.rows[m.id]} to {m.after.snapshot.rows[m.id]}",
    )
    columns = m.xp.where(groups.encoder_tokens, m.blocks_for(m.encoder), m.blocks_for(m.asked))
    columns = m.xp.where(groups.one_block, 1, columns)
    needed = m.xp.sum(m.xp.maximum(columns - m.mine(m.before.lengths), 0))
    simple = (m.adopted == 0) & (m.external == 0) & (m.must_fit == 0) & (not mamba)
    needs = m.xp.where(simple, needed, _most_needed(m, m.xp.maximum(m.asked, m.fact("length"))))
    eager = (free - spared >= needs) & ((m.adopted == 0) | (not mamba))
    yield refused & eager, lambda: f"refused with {free} blocks free, {spared} set aside, and {needs} needed"


def _most_needed(m: ArrayMoment, tokens: Any) -> Any:
    """More blocks than any rule could ask for: whole rows, scratch, a checkpoint, a copy and an external state each."""
    return m.xp.sum(m.groups.scratch_blocks + m.blocks_for(m.xp.maximum(tokens, m.encoder)) + 4)


# Rules of admission, checked by counting, block by block, what a grant would take out of the queue.


@remembering("hit admission", "B-I24", needs=("references",))
class HitAdmission:
    """Remembers the last hit, the keys of this step and how far requests had come before it, and counts. One a run.

    Args:
      config: the cache's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._recurrent = any(spec.snapshot for spec in config.topology.specs)
        self._found: oplog.Hit | None = None
        self._young: set[tuple[int, str]] = set()
        self._came: dict[str, int] = {}

    def check(self, moment: Moment) -> Iterator[str]:
        """A waiting request is granted blocks if and only if those it needs are free beside those set aside.

        It needs a block for each column that is still read or to be written, less the columns of its hit that
        somebody uses already, and one for a hit that ends inside a block. Holds after `allocate` of a waiting request.
        Exceptions: of requests that must fit whole only grants are judged, by what full attention takes; with Mamba
        groups only refusals are, by a bound that no rule can exceed, and not those of a hit that will be copied
        before it is written: on a state that got its key, or was moved to a copy, in this very step; inside a block
        that got its key in this step, unless a running request in whose row it stands had come so far before.
        """
        operation, answer = moment.operation, moment.answer
        if isinstance(operation, oplog.StepOp):
            self._young.clear()
            self._came = {id: record.computed for id, record in moment.ledger.requests.items()}
        elif isinstance(operation, oplog.FreeOp | oplog.PopOp):
            self._came.pop(operation.id, None)
        elif isinstance(operation, oplog.LookupOp) and isinstance(answer, oplog.Hit):
            self._found = answer
        elif isinstance(operation, oplog.AllocateOp) and operation.id not in moment.before.rows:
            granted = isinstance(answer, oplog.Allocation) and answer.blocks is not None
            judge = self._judge_gate if operation.must_fit else self._judge
            yield from judge(moment, operation, granted)
        self._young |= {
            (group, key)
            for block, (group, tokens, key) in moment.after.cached.items()
            if moment.before.cached.get(block) != (group, tokens, key)
        }

    def _judge_gate(self, moment: Moment, operation: oplog.AllocateOp, granted: bool) -> Iterator[str]:
        """Problems of an allocation that must fit whole: full attention's blocks, counted alone, do not fit."""
        hit = self._adopted(operation)
        length = min(len(moment.ledger.requests[operation.id].tokens), self._config.max_model_len)
        needed = 0
        for group, row in enumerate(hit):
            if self._config.topology.groups[group].spec.reads_all:
                used = sum(block != 0 and not _is_free(moment.before, block) for block in row)
                needed += -(-length // self._config.block_size(group)) - used
        free = len(moment.before.free) - int(HostMoment.of(moment).set_aside)
        if granted and needed > free:
            yield f"granted with {free} blocks free, where the whole request takes {needed} of full attention alone"

    def _adopted(self, operation: oplog.AllocateOp) -> list[list[int]]:
        found = self._found
        if operation.rows is not None:
            return operation.rows
        return found.blocks if operation.hit and found is not None else [[] for _ in self._config.block_sizes]

    def _judge(self, moment: Moment, operation: oplog.AllocateOp, granted: bool) -> Iterator[str]:
        hit = self._adopted(operation)
        waits = any(self._waits(moment, operation.hit, group, row) for group, row in enumerate(hit))
        m = HostMoment.of(moment)
        yield from sentences(admitted(m, *m.padded(hit), np.bool_(self._recurrent and waits)))

    def _waits(self, moment: Moment, hit: int, group: int, row: list[int]) -> bool:
        """True if the block a hit ends in is written in this very step, and would be copied before that."""
        before, size = moment.before, self._config.block_size(group)
        if not row or row[-1] not in before.cached or before.cached[row[-1]][::2] not in self._young:
            return False
        if self._config.topology.groups[group].spec.snapshot:
            return True
        owners = (id for id, rows in before.rows.items() if rows[group][len(row) - 1 : len(row)] == row[-1:])
        return hit % size > 0 and all(self._came.get(id, 0) < hit for id in owners)


def _is_free(before: Snapshot, block: int) -> bool:
    return block != 0 and block not in before.refs


def admitted(m: ArrayMoment, found: Any, covered: Any, waits: Any) -> Iterator[Wrong]:
    """The count of `hit admission` for a waiting request, over arrays: the explorer asks it, too.

    Args:
      m: the moment of its `allocate`.
      found: int[G, W], blocks of the hit that it adopts.
      covered: int[G], columns of them.
      waits: True if the hit may have to wait for what this step writes; asked beside states alone.
    """
    groups, free = m.groups, m.before.free - m.reserved - m.set_aside
    if groups.snapshot.any():
        bound = _most_needed(m, m.asked)
        refused = ~m.granted & (free >= bound)
        yield refused & ~waits, lambda: f"refused with {free} blocks free, and less than {bound} needed"
        return
    at = np.arange(found.shape[1])
    read = ~m.outgrown(m.fact("computed") + m.adopted + m.external, found.shape[1])
    new = (at >= covered[:, None]) & (at < m.blocks_for(m.asked)[:, None]) & read
    # A block of the hit that nobody uses leaves the queue, and is not free any more either (`touch`).
    queued = (found > 0) & m.take(m.before.refs == 0, found) & read
    copied = (covered > 0) & (m.adopted % groups.sizes > 0)
    costs = m.xp.sum(new, axis=1) + m.xp.sum(queued, axis=1) + copied
    costs = m.xp.where(groups.encoder_tokens, m.blocks_for(m.encoder), costs)
    needed = m.xp.sum(m.xp.where(groups.one_block, 1, costs))
    yield (
        m.granted != (needed <= free),
        lambda: f"{'granted' if m.granted else 'refused'} with {free} blocks free and {needed} needed",
    )

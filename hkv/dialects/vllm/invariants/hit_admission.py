"""Rules of admission, checked by counting, block by block, what a grant would take out of the queue."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, Snapshot, remembering
from hkv.dialects.vllm.log import structs as oplog


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
        free = len(moment.before.free) - self._set_aside(moment, operation)
        if granted and needed > free:
            yield f"granted with {free} blocks free, where the whole request takes {needed} of full attention alone"

    def _adopted(self, operation: oplog.AllocateOp) -> list[list[int]]:
        found = self._found
        if operation.rows is not None:
            return operation.rows
        return found.blocks if operation.hit and found is not None else [[] for _ in self._config.block_sizes]

    def _set_aside(self, moment: Moment, operation: oplog.AllocateOp) -> int:
        """The watermark, while another request runs."""
        others = any(moment.before.rows.get(id) for id in moment.before.rows)
        others = others if operation.scheduled is None else operation.scheduled
        return self._config.watermark_blocks if others and operation.waiting is not False else 0

    def _judge(self, moment: Moment, operation: oplog.AllocateOp, granted: bool) -> Iterator[str]:
        before = moment.before
        hit = self._adopted(operation)
        free = len(before.free) - operation.reserved - self._set_aside(moment, operation)
        if self._recurrent:
            waits = any(self._waits(moment, operation.hit, group, row) for group, row in enumerate(hit))
            if not granted and not waits and free >= self._bound(moment, operation):
                yield f"refused with {free} blocks free, and less than {self._bound(moment, operation)} needed"
            return
        needed = sum(self._cost(moment, operation, group, row) for group, row in enumerate(hit))
        if granted != (needed <= free):
            yield f"{'granted' if granted else 'refused'} with {free} blocks free and {needed} needed"

    def _waits(self, moment: Moment, hit: int, group: int, row: list[int]) -> bool:
        """True if the block a hit ends in is written in this very step, and would be copied before that."""
        before, size = moment.before, self._config.block_size(group)
        if not row or row[-1] not in before.cached or before.cached[row[-1]][::2] not in self._young:
            return False
        if self._config.topology.groups[group].spec.snapshot:
            return True
        owners = (id for id, rows in before.rows.items() if rows[group][len(row) - 1 : len(row)] == row[-1:])
        return hit % size > 0 and all(self._came.get(id, 0) < hit for id in owners)

    def _cost(self, moment: Moment, operation: oplog.AllocateOp, group: int, hit: list[int]) -> int:
        spec, size = self._config.topology.groups[group].spec, self._config.block_size(group)
        if spec.one_block:
            return 1
        if spec.encoder_tokens:
            return -(-(operation.encoder or 0) // size)
        start = moment.ledger.requests[operation.id].computed + operation.hit + operation.external
        skipped = spec.retired(start, size)
        columns = range(len(hit), -(-moment.ledger.slots(operation) // size))
        new = sum(column not in skipped for column in columns)
        adopted = sum(_is_free(moment.before, block) for column, block in enumerate(hit) if column not in skipped)
        return new + adopted + (1 if hit and operation.hit % size else 0)

    def _bound(self, moment: Moment, operation: oplog.AllocateOp) -> int:
        scratch = sum(spec.scratch_blocks for spec in self._config.topology.specs)
        tokens = max(moment.ledger.slots(operation), operation.encoder or 0)
        return scratch + sum(-(-tokens // size) + 4 for size in self._config.block_sizes)


def _is_free(before: Snapshot, block: int) -> bool:
    return block != 0 and block not in before.refs

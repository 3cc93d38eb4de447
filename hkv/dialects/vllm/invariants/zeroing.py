"""Blocks that a worker zeroes are those newly handed out."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, remembering
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Hit, Rows


@remembering("zeroing", "B-I17", after=(oplog.LookupOp, oplog.AllocateOp, oplog.UnwrittenOp, oplog.ZerosOp))
class Zeroing:
    """Blocks that entered rows without being part of a hit, since they were last zeroed. One for each run.

    Args:
      config: the cache's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._due: collections.Counter[int] = collections.Counter()
        self._found: Rows = []

    def check(self, moment: Moment) -> Iterator[str]:
        """The blocks to be zeroed are those that attention groups were newly handed out, each as often as it was.

        Holds after `zeros`. Exceptions: blocks for tokens that a load is about to write (`loaded`), until it says that
        it did not (`unwritten`); states and `opaque` groups, which are never zeroed.
        """
        operation = moment.operation
        match operation:
            case oplog.LookupOp():
                self._found = moment.answer.blocks if isinstance(moment.answer, Hit) else []
            case oplog.AllocateOp():
                self._note(moment, operation)
            case oplog.UnwrittenOp():
                for group, row in enumerate(moment.after.rows[operation.id]):
                    if self._config.zeroes(group):
                        self._due.update(row[operation.tokens // self._config.block_size(group) :])
            case _:
                assert isinstance(moment.answer, list)
                listed = collections.Counter(moment.answer)
                if missing := sorted((self._due - listed).elements()):  # type: ignore[operator]
                    yield f"blocks {missing} were handed out, and are not zeroed"
                if strange := sorted((listed - self._due).elements()):  # type: ignore[operator]
                    yield f"blocks {strange} are zeroed, and were not handed out"
                self._due.clear()

    def _note(self, moment: Moment, operation: oplog.AllocateOp) -> None:
        if not self._config.zeroing or not isinstance(moment.answer, Allocation) or moment.answer.blocks is None:
            return
        before = moment.before.rows.get(operation.id)
        hit = operation.rows if operation.rows is not None else self._found if operation.hit else []
        for group, row in enumerate(moment.after.rows[operation.id]):
            # By column: a block that a window has just given back may come again further on.
            known = before[group] if before else hit[group] if hit else []
            new = [block for column, block in enumerate(row) if block and known[column : column + 1] != [block]]
            if operation.external and group in operation.loaded:
                new = [block for block in new if block in moment.answer.blocks[group]]
            if self._config.zeroes(group):
                self._due.update(new)

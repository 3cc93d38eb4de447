"""Answers of vLLM 0.33's operations, read off what a dispatch of the compiled cache gave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hkv.dialects.vllm.log.structs import Allocation, Hit, Reset, Rows
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Column
from hkv.errors import EngineFailure, OperationError
from hkv.state.status import Status

REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may be refused without anything being wrong."""


class Answers:
    """Reads an operation's row of results, and keeps what allocations queued: copies, and blocks to be zeroed.

    Args:
      zeroed: of each group of the cache, whether its new blocks are to be zeroed.

    Attributes:
      pending_copies: group, source and target of copies that were not taken yet.
      zeros: of each group, the blocks that are to be zeroed.
    """

    def __init__(self, zeroed: Sequence[bool]) -> None:
        self._groups, self._zeroed = len(zeroed), tuple(zeroed)
        self.pending_copies: list[list[int]] = []
        self.zeros: list[list[int]] = [[] for _ in zeroed]

    def take_copies(self) -> list[list[int]]:
        """Group, source and target of the copies that were queued since they were last taken."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def hit(self, row: np.ndarray, ids: np.ndarray) -> Hit:
        """Answer to a lookup."""
        if row[Column.STATUS] == Status.ENGINE_FAILURE:
            raise EngineFailure("keys", Status.ENGINE_FAILURE.name, "a key for every block up to the last token")
        check(row)
        blocks = self._rows(row, ids, leading=True)
        return Hit(int(row[Column.VALUE]), blocks, int(row[Column.SHARED_PREFIX]))

    def allocation(self, row: np.ndarray, ids: np.ndarray) -> Allocation:
        """New blocks by group, or a refusal."""
        if row[Column.STATUS] in REFUSALS:
            return Allocation(None)
        check(row)
        count, place = int(row[Column.COPIES]), int(row[Column.IDS])
        copies = ids[place : place + 3 * count].reshape(-1, 3).tolist()
        self.pending_copies += copies
        blocks = self._rows(row, ids, leading=False)
        for group, _, target in copies if row[Column.VALUE] else ():
            blocks[group].insert(0, target)
        for zeroed, zeros, new in zip(self._zeroed, self.zeros, blocks, strict=True):
            zeros += new if zeroed else []
        return Allocation(blocks)

    def take_zeros(self) -> list[int]:
        """The blocks that are to be zeroed, group by group, since they were last taken."""
        zeros, self.zeros = self.zeros, [[] for _ in self._zeroed]
        return [block for blocks in zeros for block in blocks]

    def zero_loaded(
        self, rows: Rows, starts: Sequence[int], before: Sequence[int], blocks: Rows, loaded: Sequence[int]
    ) -> None:
        """Enters the blocks that an allocation took for tokens from elsewhere, which its answer leaves out.

        Args:
          rows: the request's rows after it.
          starts: of each group, the columns of the hit that it adopted.
          before: of each group, the number of blocks that were to be zeroed before it.
          blocks: its answer, of each group the new blocks.
          loaded: groups whose blocks a load writes.
        """
        for group, row in enumerate(rows):
            if self._zeroed[group] and group not in loaded:
                own = set(blocks[group])
                external = [block for block in row[starts[group] :] if block and block not in own]
                self.zeros[group][before[group] : before[group]] = external

    def zero_row(self, rows: Rows, starts: Sequence[int]) -> None:
        """Enters the blocks of a request's rows from these columns on."""
        for group, row in enumerate(rows):
            self.zeros[group] += row[starts[group] :] if self._zeroed[group] else []

    @staticmethod
    def reset(row: np.ndarray, ids: np.ndarray) -> Reset:
        """True if the prefix cache was reset."""
        del ids
        if row[Column.STATUS] != Status.IN_USE:
            check(row)
        return Reset(bool(row[Column.VALUE]))

    def _rows(self, row: np.ndarray, ids: np.ndarray, leading: bool) -> list[list[int]]:
        place, rows = int(row[Column.IDS]) + 3 * int(row[Column.COPIES]), []
        for group in range(self._groups):
            start, end = (int(row[RESULT_FRONT + 2 * group + side]) for side in (0, 1))
            rows.append([0] * (start if leading else 0) + ids[place : place + end - start].tolist())
            place += end - start
        return rows


def check(row: np.ndarray) -> None:
    """Raises what a row's status stands for.

    Raises:
      EngineFailure: the engine itself fails here, as vLLM would.
      OperationError: the operation does not apply.
    """
    status = Status(int(row[Column.STATUS]))
    if status == Status.ENGINE_FAILURE:
        raise EngineFailure("blocks", status.name, "as many free blocks as the estimate said")
    if status != Status.OK:
        raise OperationError("operation", status.name, "one that applies to the request's state")

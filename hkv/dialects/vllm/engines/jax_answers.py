"""Answers of vLLM 0.33's operations, read off what a dispatch of the compiled cache gave."""

from __future__ import annotations

import numpy as np

from hkv.dialects.vllm.log.structs import Allocation, Hit, Reset
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Column
from hkv.errors import EngineFailure, OperationError
from hkv.state.status import Status

REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may be refused without anything being wrong."""


class Answers:
    """Reads an operation's row of results, and keeps the copies that allocations queued.

    Args:
      groups: groups of the cache.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._copies: list[list[int]] = []

    def take_copies(self) -> list[list[int]]:
        """Group, source and target of the copies that were queued since they were last taken."""
        copies, self._copies = self._copies, []
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
        self._copies += copies
        blocks = self._rows(row, ids, leading=False)
        for group, _, target in copies if row[Column.VALUE] else ():
            blocks[group].insert(0, target)
        return Allocation(blocks)

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

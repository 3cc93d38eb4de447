"""A batch of mixed operations as arrays, whatever their columns mean."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import numpy as np

from hkv.errors import OperationError

WIDTH = 16
"""Columns of `Operations.table`."""

LARGE = 1 << 19
"""Size from which on buckets grow by two, not by four."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations in order.

    Attributes:
      table: int32[n, 16], a row each, its columns the dialect's; the first row with code `END` and all after it do
        nothing.
      payload: int32[m], prefix keys or block ids that rows point into.
    """

    table: jax.Array
    payload: jax.Array


class OperationBatch:
    """Collects operations on the host and makes `Operations` of them, padded so that shapes repeat. Dialects derive."""

    ARGUMENTS: ClassVar[type[enum.IntEnum]]
    """Columns of a row; `CODE` and `SLOT` are among them."""

    SPAN: ClassVar[tuple[enum.IntEnum, enum.IntEnum]]
    """Columns of how many integers of the payload are an operation's, and of where they begin."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._payload: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def payload_size(self) -> int:
        """Integers of payload so far."""
        return len(self._payload)

    def add(self, code: enum.IntEnum, slot: int = 0, payload: Sequence[int] = (), **arguments: int) -> Self:
        """Adds an operation.

        Args:
          code: code of the operation.
          slot: the request slot.
          payload: the integers that it names.
          **arguments: further columns, by their names in small letters; the others are 0.
        """
        row = np.zeros(WIDTH, np.int32)
        row[self.ARGUMENTS["CODE"]], row[self.ARGUMENTS["SLOT"]] = code, slot
        for column, value in zip(self.SPAN, (len(payload), len(self._payload)), strict=True):
            row[column] = value
        for name, value in arguments.items():
            row[self.ARGUMENTS[name.upper()]] = value
        self._rows.append(row)
        self._payload.extend(payload)
        return self

    def build(self, least: int = 16, least_payload: int = 64) -> Operations:
        """The operations as NumPy arrays; both sizes are rounded up to a power of four times the least.

        Raises:
          OperationError: there are none.
        """
        if not self._rows:
            raise OperationError("operations", 0, "at least one")
        table = np.zeros((bucket(len(self._rows) + 1, least), WIDTH), np.int32)
        table[: len(self._rows)] = self._rows
        payload = np.zeros(bucket(len(self._payload), least_payload), np.int32)
        payload[: len(self._payload)] = self._payload
        return Operations(table=table, payload=payload)  # type: ignore[arg-type]


def bucket(size: int, least: int) -> int:
    """The smallest `least * 4**k` that is at least `size`; from `LARGE` on half of it, where that is enough.

    Few sizes mean few executables, but large arrays take their time to be filled.
    """
    found = least
    while found < size:
        found *= 4
    half = found // 2
    return half if max(size, least, LARGE) <= half else found


def nearest(size: int, least: int) -> int:
    """The smallest multiple of `least` that is at least `size`: for arrays that another rounding makes too large."""
    return -(-size // least) * least

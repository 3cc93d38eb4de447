"""A batch of mixed operations as arrays, and what they answer."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import numpy as np

from hkv.errors import OperationError


class Code(enum.IntEnum):
    """What an operation does; its arguments are in `Argument` columns."""

    END = 0
    """No more operations."""
    REQUEST = 1
    """A request arrives in an empty slot and waits. TOKENS of its prompt, KEYS prefix keys from KEY_START on."""
    APPEND = 2
    """TOKENS generated tokens, and the KEYS that they complete, are added to a request."""
    LOOKUP = 3
    """The longest hit of a waiting request."""
    ALLOCATE = 4
    """A request gets blocks for its next tokens; a waiting one runs from then on. See `Argument`."""
    ADVANCE = 5
    """TOKENS more tokens of a running request are computed."""
    COMMIT = 6
    """The first TOKENS tokens of a running request are certain: the blocks they fill are registered."""
    RETIRE = 7
    """Blocks of a running request that the query at TOKENS cannot read are given back."""
    FREE = 8
    """A running request gives all its blocks back and waits."""
    DROP = 9
    """A waiting request is forgotten; its slot is empty."""
    EVICT = 10
    """KEYS block ids, from KEY_START on, lose their keys."""
    RESET = 11
    """All blocks lose their keys, unless one is in use."""
    FORK = 12
    """A request is started in the empty slot TOKENS from the running one in SLOT: it shares that one's full blocks, and
    gets copies of its own of the last ones, which are still being written."""
    STEP = 13
    """A new scheduling step begins."""
    COPIES = 14
    """Copies are made: KEYS block ids, from KEY_START on, give back a reference each, in that order."""


class Argument(enum.IntEnum):
    """Columns of `Operations.table`. Lengths are in tokens."""

    CODE = 0
    SLOT = 1
    """The request slot."""
    TOKENS = 2
    KEYS = 3
    """How many integers of `Operations.payload` belong to the operation."""
    KEY_START = 4
    """Where they begin."""
    NEW = 5
    """ALLOCATE: new tokens, drafts included; -1: all that the request has left."""
    HIT = 6
    """ALLOCATE: tokens of the lookup right before that are adopted; -1: all it found."""
    LOOKAHEAD = 7
    """ALLOCATE: tokens beyond the new ones that need a place."""
    EXTERNAL = 8
    """ALLOCATE: tokens that come from elsewhere, after the hit."""
    DELAY = 9
    """ALLOCATE: whether registration is left to a later COMMIT."""
    MUST_FIT = 10
    """ALLOCATE: whether the whole request must fit."""
    RESERVED = 11
    """ALLOCATE: free blocks that may not be taken."""
    IN_FLIGHT = 12
    """ALLOCATE: tokens computed but not yet processed, from now on."""
    SHARED_PREFIX = 13
    """ALLOCATE: the request's shared-prefix boundary from now on; -1: as it was."""
    ADVANCE = 14
    """ALLOCATE: whether hit, external and new tokens count as computed if it is granted."""


WIDTH = 16
"""Columns of `Operations.table`."""

RESULT_FRONT = 5
"""Columns of `Results.table` before those of the groups."""


class Column(enum.IntEnum):
    """Columns of `Results.table`; then follow, for each group, first and last-but-one entry of the row that it is
    about."""

    STATUS = 0
    """`hkv.state.status.Status`."""
    VALUE = 1
    """LOOKUP: tokens hit. ALLOCATE: tokens adopted. RESET: 1 if done. EVICT: ids dropped."""
    SHARED_PREFIX = 2
    """LOOKUP: the longest hit of a single group if that is longer than the hit, else 0."""
    IDS = 3
    """Where its block ids begin in `Results.ids`."""
    COPIES = 4
    """ALLOCATE, FORK: how many blocks are to be copied. ALLOCATE reports them before its other ids, three integers
    each: the group, the block, its copy; both hold a reference more until COPIES gives it back. Where tokens of a hit
    were adopted, the copy has taken the block's place in the row; else the block stays, and the copy is the cache's."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations in order.

    Attributes:
      table: int32[n, 16], a row each, columns `Argument`; the first row with code `END` and all after it do nothing.
      payload: int32[m], prefix keys or block ids that rows point into.
    """

    table: jax.Array
    payload: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Results:
    """What operations answered.

    Attributes:
      table: int32[n, 5 + 2 * groups], a row for each operation: `Column`, then two columns a group. LOOKUP: the
        entries of the row that hold blocks, those before are null. ALLOCATE: the entries that are new. FORK: the
        entries that were copied.
      ids: int32[capacity], block ids, operation after operation and group after group: LOOKUP, from the first entry
        that is not null; ALLOCATE, the new entries; FORK, source and destination of each copy.
      events: int32[capacity, 4], what happened to keys (`hkv.state.events`).
      counts: int32[2], ids and events, those without room included; more than the capacity means that some are missing.
    """

    table: jax.Array
    ids: jax.Array
    events: jax.Array
    counts: jax.Array


class Batch:
    """Collects operations on the host and makes `Operations` of them, padded so that shapes repeat."""

    ARGUMENTS: ClassVar[type[enum.IntEnum]] = Argument
    """Columns of a row; `CODE` and `SLOT` are among them."""

    SPAN: ClassVar[tuple[enum.IntEnum, enum.IntEnum]] = (Argument.KEYS, Argument.KEY_START)
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
          code: what it does.
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
    """The smallest `least * 4**k` that is at least `size`."""
    while least < size:
        least *= 4
    return least

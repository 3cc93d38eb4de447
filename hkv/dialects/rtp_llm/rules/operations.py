"""Columns of RTP-LLM's mixed operations, and what they answer.

An operation is a call of `KVCacheAllocator` (`malloc`, `insertIntoCache`, `updateKVBlock`, `free`, ...) as a row of 15
integers; keys, and the sources of a fork, stand in a payload that rows point into.
"""

from __future__ import annotations

import dataclasses
import enum

import jax

from hkv.machine.operations import OperationBatch


class RtpCode(enum.IntEnum):
    """Code of an operation; its arguments are in `RtpArgument` columns."""

    END = 0
    """No more operations."""
    REQUEST = 1
    """A request of SEQUENCES sequences with TOKENS tokens each arrives in an empty slot; NUMBERS keys, one for each
    whole block."""
    APPEND = 2
    """Each sequence gets TOKENS more tokens; the NUMBERS keys of the blocks that they fill, sequence after sequence."""
    MALLOC = 3
    """Blocks for all tokens that a request has: of a new one, or one that grew. REUSE, DEVICE_CACHE, LENGTH."""
    INSERT = 4
    """A request's whole blocks are entered into the cache; with RESIDENT they are never evicted."""
    FORK = 5
    """The sequences of a request become those that NUMBERS integers name; with COPY the last blocks are copied."""
    FREE = 6
    """A request gives all its blocks back."""
    DROP = 7
    """A request without blocks is forgotten; its slot is empty."""
    HOLD = 8
    """The blocks of SEQUENCE that have keys get a reference of ROLE each."""
    RELEASE = 9
    """NUMBERS integers, group and block in turn: each block gives a reference of ROLE back."""
    EXPORT = 10
    """At least LEAST blocks are evicted and keep their references; RELEASE gives them back."""
    EVICT = 11
    """At least LEAST blocks are evicted and given back."""
    PEAK = 12
    """Blocks that a request will hold at most: TOKENS to come, SEQUENCES then, REUSE of states. Changes nothing."""


ALL = tuple(code for code in RtpCode if code != RtpCode.END)
"""Every operation."""


class RtpArgument(enum.IntEnum):
    """Columns of `Operations.table`."""

    CODE = 0
    SLOT = 1
    """The request slot."""
    TOKENS = 2
    NUMBERS = 3
    """Number of integers of `Operations.payload` that belong to the operation."""
    START = 4
    """Index of the first of these integers."""
    SEQUENCES = 5
    RESERVE = 6
    """REQUEST: tokens beyond the next one's that get slots each step."""
    REUSE = 7
    """1 if the blocks of the request may be reused by others: states on the grid are kept."""
    DEVICE_CACHE = 8
    """MALLOC: whether a new request may take over cached blocks."""
    RESIDENT = 9
    COPY = 10
    SEQUENCE = 11
    ROLE = 12
    """`hkv.state.pooled.Role`."""
    LEAST = 13
    LENGTH = 14
    """MALLOC: tokens of each sequence that get slots (RTP-LLM `incr_seq_len_override`); 0 for all it has."""


class RtpColumn(enum.IntEnum):
    """Columns of `RtpResults.table`."""

    STATUS = 0
    """`hkv.state.status.Status`."""
    VALUE = 1
    """MALLOC: tokens reused. HOLD: blocks held. EXPORT, EVICT: blocks that left. PEAK: blocks. RELEASE: references
    that did not exist."""
    IDS = 2
    """Index of its first id in `RtpResults.ids`."""
    COUNT = 3
    """FORK: copies. EXPORT: keys."""


COLUMNS = len(RtpColumn)
"""Columns of `RtpResults.table`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RtpResults:
    """Results of operations. The lists themselves are in the state.

    Attributes:
      table: int32[n, 4], a row for each operation, columns `RtpColumn`.
      ids: int32[capacity], FORK: group, block and copy of each copy to make; EXPORT: key, then its block in each group,
        0 for none.
      count: int32[], ids, those without room included; more than the capacity means that some are missing.
    """

    table: jax.Array
    ids: jax.Array
    count: jax.Array


class RtpBatch(OperationBatch):
    """A batch of RTP-LLM's operations: keys, sources, or groups and blocks as payload."""

    ARGUMENTS = RtpArgument
    SPAN = (RtpArgument.NUMBERS, RtpArgument.START)

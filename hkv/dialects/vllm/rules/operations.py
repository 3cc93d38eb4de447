"""Columns of vLLM 0.33's mixed operations, and what they answer.

An operation is a call of `KVCacheManager` (`get_computed_blocks`, `allocate_slots`, `free`, ...) or of its scheduler,
as a row of 16 integers; keys and block ids, of which there may be any number, stand in a payload that rows point into.
"""

from __future__ import annotations

import dataclasses
import enum

import jax

from hkv.machine.operations import OperationBatch


class Code(enum.IntEnum):
    """Code of an operation; its arguments are in `Argument` columns."""

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
    """Copies are made: KEYS block ids, from KEY_START on, give back a reference each, in that order. With `Flag.HOLD`
    they gain one instead."""
    COMPUTED = 15
    """TOKENS tokens of a request are computed in all: more than it has, or fewer than before."""
    POP = 16
    """A running request waits again, without its blocks, which keep their references."""
    FOUND = 17
    """A waiting request is to adopt a hit of TOKENS tokens that no lookup found: for each group, from KEY_START on, how
    many blocks, and these."""


class Argument(enum.IntEnum):
    """Columns of `Operations.table`. Lengths are in tokens."""

    CODE = 0
    SLOT = 1
    """The request slot."""
    TOKENS = 2
    """Of LOOKUP, one more than the most tokens of the hit; 0 for all but the request's last. ALLOCATE: tokens of an
    encoder's output that want slots."""
    KEYS = 3
    """Number of integers of `Operations.payload` that belong to the operation."""
    KEY_START = 4
    """Index of the first of these integers."""
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
    FLAGS = 15
    """`Flag`s."""


class Flag(enum.IntFlag):
    """Bits of `Argument.FLAGS`."""

    LIVE = 1
    """COMMIT, RETIRE: a live scheduler keeps account of the tokens computed."""
    STATUS = 2
    """ALLOCATE: `Flag.WAITING` says of the request, and not the blocks that it holds, that it has to be scheduled."""
    WAITING = 4
    OTHERS = 8
    """ALLOCATE: `Flag.SCHEDULED` says, and not the blocks that others hold, that some request is scheduled."""
    SCHEDULED = 16
    HOLD = 32
    """COPIES: the blocks gain a reference."""
    ROWS = 64
    """ALLOCATE: the hit is one that FOUND brought."""


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
    """LOOKUP: the longest prefix that the search came to if that is longer than the hit, else 0."""
    IDS = 3
    """Index of its first block id in `Results.ids`."""
    COPIES = 4
    """ALLOCATE, FORK: how many blocks are to be copied. ALLOCATE reports them before its other ids, three integers
    each: the group, the block, its copy; both hold a reference more until COPIES gives it back. Where tokens of a hit
    were adopted, the copy has taken the block's place in the row; else the block stays, and the copy is the cache's."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Results:
    """Results of operations.

    Attributes:
      table: int32[n, 5 + 2 * groups], a row for each operation: `Column`, then two columns a group. LOOKUP: the
        entries of the row that hold blocks, those before are null. ALLOCATE: the entries that are new. FORK: the
        entries that were copied.
      ids: int32[capacity], block ids, operation after operation and group after group: LOOKUP, from the first entry
        that is not null; ALLOCATE, the new entries; FORK, source and destination of each copy.
      events: int32[capacity, 4], changes to keys (`hkv.state.workspace.Event`).
      counts: int32[2], ids and events, those without room included; more than the capacity means that some are missing.
    """

    table: jax.Array
    ids: jax.Array
    events: jax.Array
    counts: jax.Array


class Batch(OperationBatch):
    """A batch of vLLM's operations: prefix keys or block ids as payload."""

    ARGUMENTS = Argument
    SPAN = (Argument.KEYS, Argument.KEY_START)

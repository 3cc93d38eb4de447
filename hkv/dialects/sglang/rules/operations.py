"""Columns of SGLang's mixed operations, and what they answer.

An operation is what SGLang's scheduler does with a request, or asks of the cache, as a row of 16 integers; the keys of
whole pages stand in a payload that rows point into.
"""

from __future__ import annotations

import dataclasses
import enum

import jax

from hkv.machine.operations import OperationBatch


class SGLangCode(enum.IntEnum):
    """Code of an operation; its arguments are in `SGLangArgument` columns."""

    END = 0
    """No more operations."""
    MATCH = 1
    """Longest cached prefix of TOKENS tokens, which counts as a use; NUMBERS keys of their whole pages. No slot."""
    ADMIT = 2
    """A request of TOKENS tokens with PRIORITY comes into an empty slot; NUMBERS keys of its whole pages."""
    EXTEND = 3
    """Its tokens up to LENGTH get slots; with TRACK, the state after so many is kept."""
    DECODE = 4
    """One more token, which may complete a page: NUMBERS keys, none or one. With TRACK the state after it is kept."""
    SLIDE = 5
    """Window pages that it reads no more are freed, once they are of EVERY tokens or more."""
    CHECKPOINT = 6
    """Enters the tokens that it has computed."""
    RELEASE_WINDOW = 7
    """The window's part of its lock is given back."""
    FINISH = 8
    """It ends, and what it has computed is entered; with LENGTH so many tokens of it, where a pass ran beyond them."""
    ABORT = 9
    """It ends, and nothing is entered."""
    EVICT = 10
    """At least FULL and WINDOW tokens, and STATES states, leave."""
    ROOM = 11
    """Nodes leave until FULL tokens are free in each pool, or no more may. No slot."""


ALL = tuple(code for code in SGLangCode if code != SGLangCode.END)
"""Every operation."""


class SGLangArgument(enum.IntEnum):
    """Columns of `Operations.table`."""

    CODE = 0
    SLOT = 1
    """The request slot."""
    TOKENS = 2
    NUMBERS = 3
    """Number of keys of `Operations.payload` that belong to the operation."""
    START = 4
    """Index of the first of these keys."""
    PRIORITY = 5
    LENGTH = 6
    TRACK = 7
    EVERY = 8
    FULL = 9
    WINDOW = 10
    STATES = 11


class SGLangColumn(enum.IntEnum):
    """Columns of `SGLangResults.table`."""

    STATUS = 0
    """`hkv.state.status.Status`."""
    HIT = 1
    """MATCH, ADMIT: pages that are found."""
    FULL = 2
    """MATCH, ADMIT: pages that full attention alone would find. EVICT: tokens that were freed."""
    WINDOW = 3
    """EVICT: tokens that were freed."""
    STATES = 4
    """EVICT: states that were freed."""


COLUMNS = len(SGLangColumn)
"""Columns of `SGLangResults.table`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SGLangResults:
    """Results of operations; rows of pages are in the state.

    Attributes:
      table: int32[n, 5], a row for each operation, columns `SGLangColumn`.
    """

    table: jax.Array


class SGLangBatch(OperationBatch):
    """A batch of SGLang's operations, with keys as payload."""

    ARGUMENTS = SGLangArgument
    SPAN = (SGLangArgument.NUMBERS, SGLangArgument.START)

"""The one table of status codes: what a compiled operation answers when it does not raise."""

from __future__ import annotations

import enum


@enum.unique
class Status(enum.IntEnum):
    """Outcome of an operation. Any code other than `OK` and `OUT_OF_RANGE` took nothing."""

    OK = 0
    """The operation took effect."""
    NO_ROOM_FOR_SEQUENCE = 1
    """Refused: the pool cannot hold the whole sequence that must fit."""
    NO_ROOM = 2
    """Refused: too few free blocks for the next tokens. The dialect may have retired blocks before."""
    ROW_FULL = 3
    """Refused: the request would need more blocks than its row has room for."""
    NO_SUCH_SLOT = 4
    """Refused: the request slot does not exist, or holds no request."""
    NOT_WAITING = 5
    """Refused: the operation is for a request that holds no blocks, and this one does."""
    NOT_RUNNING = 6
    """Refused: the operation is for a request that holds blocks, and this one does not."""
    STALE_HIT = 7
    """Refused: there is no lookup of that many tokens right before to adopt."""
    IN_USE = 8
    """Refused: some block is referenced."""
    NOTHING_TO_ALLOCATE = 9
    """Refused: no new, no cached and no external tokens."""
    OUT_OF_RANGE = 10
    """Some ids do not exist; they were dropped and counted, the others took effect."""
    KEYS_FULL = 11
    """Refused: more prefix keys than the request's chain, or the key table, has room for."""
    BLOCK_MISSING = 12
    """Refused: a block that would have to be shared or copied is not there."""
    UNKNOWN_OPERATION = 13
    """Refused: no such operation in this program."""
    NOT_COMPUTED = 14
    """Refused: more tokens than the request has computed, or than it has."""
    ENGINE_FAILURE = 15
    """Refused: with the upstream defects that were asked for by name, the engine would run out of blocks halfway, or
    look for a key that a request does not have."""
    NOT_YET_WRITTEN = 16
    """Refused: the hit ends in a state, or inside a block, that is written only when this very step has run."""
    STEP_FULL = 17
    """Refused: a whole step hands out more blocks than its program has room for; the next step may serve the row."""
    NO_SUCH_ROW = 18
    """Refused: the block tables have no such row."""
    BAD_COUNT = 19
    """Refused: a count below 0 or above the number of values given."""
    NO_SUCH_POSITION = 20
    """Refused: a slot beyond the row's length."""
    BAD_LENGTH = 21
    """Refused: the row would outgrow its width or have a length below 0; or it is empty and a slot was to be popped."""
    BAD_BLOCK = 22
    """Refused: a value that is neither null nor a block whose kernel blocks an int32 can name."""
    CROSSES_STATE = 25
    """Refused: the chunk begins inside a block of a recurrent group and goes on behind its end, where no state would be
    written; `StepResult.allowed` says how many tokens may be computed."""

"""Words of a second tier's arrays: of chunks, of requests that used them, of jobs, and of what requests were told.

Under LRU the requests that used chunks are nodes of one list in the order in which chunks leave: a request stands for
all chunks that it used last, ended or not. These are found by its prefix keys, the last position first, and by a bit
for each key and group in `marks`. ARC has lists of the chunks themselves.
"""

from __future__ import annotations

import enum


class ChunkNode(enum.IntEnum):
    """Words of a row of `nodes`, of a chunk; those of a request are `User`."""

    READERS = 0
    """Transfers that read it; -1 while one writes it."""
    OWNER = 1
    """1 plus the request that used it last; of ARC, 1 if several requests have used it."""
    LINK = 2
    """While it is written, 1 plus the next chunk of its job, 0 for none; then the number of the last offer of it."""
    BLOCK = 3
    """While it is written, the block that it is written from, negative while that is not fenced; then `READ` and
    `LOADING`."""
    ENTRY = 4
    """Its place in `where`; this and the next are ARC's alone."""
    NEXT = 5
    PREVIOUS = 6


class User(enum.IntEnum):
    """Words of some rows of `nodes`, of a request."""

    JOBS = 0
    """Its jobs that go on."""
    IDLE = 1
    """Idle chunks that it stands for."""
    NUMBER = 2
    """Number of its first use of a chunk, later of its end: numbers rise."""
    NEXT = 3
    PREVIOUS = 4
    LOADED = 5
    """Tokens that were loaded for it when it was first admitted."""
    FLAGS = 6
    """`WAITED`, `ENDED`."""
    OWNED = 7
    """Chunks that it stands for."""
    CURSOR = 8
    """None of them is at this place among its keys, or behind it."""
    PARTED = 9
    """Nor, from here on, any chunk that it used and that others stand for by now."""


WAITED, ENDED = 1, 2
"""Bits of `User.FLAGS`: it was put aside once, because a chunk was on its way; it has ended."""

USER_WORDS = 16

READ, LOADING = 1, 2
"""Bits of `ChunkNode.BLOCK` of a chunk that can be read: it was read once; it is being loaded while others run."""

GHOST = -1
"""Value of `where` of a name that ARC remembers in row 0 of `ghosts`; row `n` is `GHOST - n`."""


class GhostWord(enum.IntEnum):
    """Words of a row of `ghosts`."""

    ENTRY = 0
    NEXT = 1
    """The next one of its list; of a row that came back, 1 plus the next such row."""
    PREVIOUS = 2
    OFTEN = 3
    """1 if several requests had used it."""


class ArcWord(enum.IntEnum):
    """Words of `arc`."""

    ONCE = 0
    """Chunks that one request used."""
    OFTEN = 1
    GONE_ONCE = 2
    """Names of such that left."""
    GONE_OFTEN = 3
    WHOLE = 4
    """The target: whole chunks, and two words behind the point."""
    HIGH = 5
    LOW = 6
    ROWS = 7
    """Rows of `ghosts` that were handed out."""
    FREE = 8
    """1 plus a row that came back; 0 for none."""


class TrackerWord(enum.IntEnum):
    """Words of a row of `tracker`; OFFERS of the row of ends: rows that were handed out."""

    ENTRY = 0
    OFFERS = 1
    NEXT = 2
    PREVIOUS = 3


class Handed(enum.IntEnum):
    """Words of a block beside its keys, which whoever hands it out has at hand: blocks come in any order."""

    STEP = 0
    """The step in which it was handed out or adopted last."""
    FENCE = 1
    """1 plus the row of the job that reads it, where it may be handed out; `SEVERAL` for more than one."""


SEVERAL = -1


class SlotWord(enum.IntEnum):
    """Words of a slot in `tables`."""

    END = 0
    """The step at whose end its load is done."""
    STATE = 1
    """0: nothing is loaded; 1: a load goes on; 2: it has ended; 3: and was registered."""
    BEGAN = 2
    OFFERS = 3
    """Tokens from which on it has something to offer."""
    STEP = 4
    """The step in which all its blocks were told."""


FOREVER = 2**31 - 1
"""Value of `told` of an entry that counts as its request's, whatever becomes of its block."""

LOADS, LOADED, SETTLED = 1, 2, 3
"""Values of `SlotWord.STATE`."""


class ToldRow(enum.IntEnum):
    """Words of a slot and a group in `tables`; units are blocks."""

    LENGTH = 0
    """Entries that were told."""
    FIRST = 1
    """Those before it were null when all were told."""
    WHOLE = 2
    """Entries told with all others; the later ones have their steps in `told`."""
    CURSOR = 3
    """The entry from which on it offers."""
    LOAD_FIRST = 4
    LOAD_END = 5
    HANDED_OVER = 6
    """Of states: entries before it were handed over."""


SLOT_WORDS = ROW_WORDS = 8


class Job(enum.IntEnum):
    """Words of a row of `jobs`."""

    REQUEST = 0
    END = 1
    """The step at whose end it is reported."""
    FIRST = 2
    """1 plus its first chunk; 0 once it was reported."""
    FLUSHED = 3


JOB_WORDS = 4

"""Offers of each chunk, counted for a store threshold, compiled: the twin of `ChunkPool._count`.

At most so many chunks are counted; the one offered longest ago leaves for a new one, unless all are of this offer.
Arrays are there only where a threshold asks for them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload.linked_lists import put_last, take_out
from hkv.dialects.vllm.rules.offload.parameters import TierNumber
from hkv.dialects.vllm.rules.offload.words import TrackerWord
from hkv.state.loops import Scalar, loop

WRITES = ("tracker", "tracked")


def count(w: Any, view: Any, offered: Scalar) -> Any:
    """Counts the first `offered` entries of `offers`: first those that are counted, then the others."""
    most = view.tier.number(TierNumber.TRACKED)

    def known(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, found = carried
        v, (entry,) = v.peek(at >= 0, "offers", v.offer(at))
        v, (row,) = v.peek(at >= 0, "tracked", entry)
        there = row > 0
        v, (times,) = v.peek(there, "tracker", v.tracker_word(row - 1, TrackerWord.OFFERS))
        v = v.write_if(there, "tracker", times + 1, v.tracker_word(row - 1, TrackerWord.OFFERS))
        v = _to_end(_take_out(v, there, row - 1), there, row - 1)
        # What was not known is marked, so that the second loop counts just that.
        v = v.write_if(there, "offers", 1, v.offer(at) + 1)
        v = v.write_if(~there, "offers", 0, v.offer(at) + 1)
        return v, (at + 1, found + there)

    writes = ("offers", *WRITES)
    w, (_, found) = loop(lambda c: c[0] < offered, known, w, (0, 0), writes=writes)
    w, (rows,) = w.peek(offered > 0, "tracker", w.tracker_word(w.room.tracked, TrackerWord.OFFERS))

    def new(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, rows, replaceable = carried
        v, (entry, counted) = v.peek(at >= 0, "offers", v.offer(at), v.offer(at) + 1)
        fresh = (counted == 0) & (rows < most)
        replaces = (counted == 0) & ~fresh & (replaceable > 0)
        v, (oldest,) = v.peek(replaces, "tracker", v.tracker_word(v.room.tracked, TrackerWord.NEXT))
        v, (gone,) = v.peek(replaces, "tracker", v.tracker_word(oldest, TrackerWord.ENTRY))
        v = v.write_if(replaces, "tracked", 0, gone)
        v = _take_out(v, replaces, oldest)
        row, enabled = jnp.where(fresh, rows, oldest), fresh | replaces
        v = v.write_if(enabled, "tracked", row + 1, entry)
        v = v.write_if(enabled, "tracker", entry, v.tracker_word(row, TrackerWord.ENTRY))
        v = v.write_if(enabled, "tracker", 1, v.tracker_word(row, TrackerWord.OFFERS))
        return _to_end(v, enabled, row), (at + 1, rows + fresh, replaceable - replaces)

    w, (_, rows, _) = loop(lambda c: c[0] < offered, new, w, (0, rows, rows - found), writes=writes)
    return w.write_if(offered > 0, "tracker", rows, w.tracker_word(w.room.tracked, TrackerWord.OFFERS))


def is_worth(w: Any, view: Any, entry: Scalar) -> Scalar:
    """True if an entry was offered often enough; reads `tracked` and `tracker`."""
    row = w.read("tracked", entry)
    times = w.read("tracker", w.tracker_word(jnp.where(row > 0, row - 1, w.room.tracked + 1), TrackerWord.OFFERS))
    return (row > 0) & (times >= view.tier.number(TierNumber.THRESHOLD))


def _take_out(w: Any, enabled: Scalar, row: Scalar) -> Any:
    return take_out(w, enabled, "tracker", w.tracker_word, TrackerWord, row)


def _to_end(w: Any, enabled: Scalar, row: Scalar) -> Any:
    return put_last(w, enabled, "tracker", w.tracker_word, TrackerWord, row, w.room.tracked)

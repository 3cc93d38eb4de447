"""Doubly linked lists through rows of an array: of requests that used chunks, of chunks under ARC and names that left
there, of chunks whose offers count.

A list is a ring through a row of its own, its end: what follows the end is first, and what precedes it last. So a row
is taken out and put last by the same writes whether the list is empty or not. A row stands in one list at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hkv.dialects.vllm.rules.offload.words import ChunkNode, GhostWord, TrackerWord, User
from hkv.state.loops import Scalar

Words = type[ChunkNode] | type[GhostWord] | type[TrackerWord] | type[User]
Place = Callable[[Scalar, Any], Scalar]


def take_out(w: Any, enabled: Scalar, name: str, place: Place, words: Words, row: Scalar) -> Any:
    """Takes a row out of its list.

    Args:
      w: the workspace.
      enabled: whether anything is written.
      name: the array.
      place: where in the array a word of a row stands.
      words: the row's words, NEXT and PREVIOUS among them.
      row: the row.
    """
    w, (after, before) = w.peek(enabled, name, place(row, words.NEXT), place(row, words.PREVIOUS))
    w = w.write_if(enabled, name, after, place(before, words.NEXT))
    return w.write_if(enabled, name, before, place(after, words.PREVIOUS))


def put_last(w: Any, enabled: Scalar, name: str, place: Place, words: Words, row: Scalar, end: Scalar) -> Any:
    """Puts a row that is in no list last in the one with that end."""
    w, (last,) = w.peek(enabled, name, place(end, words.PREVIOUS))
    for value, at in (
        (row, place(last, words.NEXT)),
        (last, place(row, words.PREVIOUS)),
        (end, place(row, words.NEXT)),
        (row, place(end, words.PREVIOUS)),
    ):
        w = w.write_if(enabled, name, value, at)
    return w

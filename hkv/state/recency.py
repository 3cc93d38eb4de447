"""Keys in order of use: a ring of links through the keys' own rows, the least recently used first.

What `look` reads within a `hkv.state.loops.peek`, `use` is handed to write.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from hkv.state.loops import Scalar
from hkv.state.pooled import Item
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("items",)
"""Arrays that these functions write."""


def look(work: PooledWorkspace, key: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """The neighbours of a key, the one used after it first, and the key used last; reads `items`."""
    places = work.item(key, Item.NEXT), work.item(key, Item.PREVIOUS), work.item(work.ring, Item.PREVIOUS)
    after, before, last = (work.read("items", place) for place in places)
    return after, before, last


def use(work: PooledWorkspace, present: Scalar, known: Scalar, key: Scalar, seen: Sequence[Scalar]) -> PooledWorkspace:
    """Makes a key the most recently used, if `present`; it enters the ring unless `known`. `seen` is the result of
    `look`."""
    after, before, last = seen
    known = jnp.asarray(present) & known
    last = jnp.where(known & (last == key), before, last)
    work = work.write_if(known, "items", after, work.item(before, Item.NEXT))
    work = work.write_if(known, "items", before, work.item(after, Item.PREVIOUS))
    work = work.write_if(present, "items", key, work.item(last, Item.NEXT))
    work = work.write_if(present, "items", last, work.item(key, Item.PREVIOUS))
    work = work.write_if(present, "items", work.ring, work.item(key, Item.NEXT))
    return work.write_if(present, "items", key, work.item(work.ring, Item.PREVIOUS))


def unlink(work: PooledWorkspace, present: Scalar, key: Scalar) -> PooledWorkspace:
    """Takes a key out of the ring, if `present`."""
    work, (after, before) = work.peek(present, "items", work.item(key, Item.NEXT), work.item(key, Item.PREVIOUS))
    work = work.write_if(present, "items", after, work.item(before, Item.NEXT))
    return work.write_if(present, "items", before, work.item(after, Item.PREVIOUS))

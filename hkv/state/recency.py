"""Keys in order of use: a ring of links through the keys' own rows, the least recently used first."""

from __future__ import annotations

from hkv.state.loops import Scalar, peek
from hkv.state.pooled import Item
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("items",)
"""What these functions write."""


def append(work: PooledWorkspace, present: Scalar, key: Scalar) -> PooledWorkspace:
    """Makes a key that is not in the ring the most recently used, if `present`.

    Args:
      work: needs `items` to write.
      present: whether to do it.
      key: the key.
    """
    ring = work.ring
    work, (last,) = peek(present, lambda w: (w.read("items", w.item(ring, Item.PREVIOUS)),), work, ("items",), (0,))
    work = work.write_if(present, "items", key, work.item(last, Item.NEXT))
    work = work.write_if(present, "items", last, work.item(key, Item.PREVIOUS))
    work = work.write_if(present, "items", ring, work.item(key, Item.NEXT))
    return work.write_if(present, "items", key, work.item(ring, Item.PREVIOUS))


def unlink(work: PooledWorkspace, present: Scalar, key: Scalar) -> PooledWorkspace:
    """Takes a key out of the ring, if `present`.

    Args:
      work: needs `items` to write.
      present: whether to do it.
      key: a key in the ring.
    """
    work, (after, before) = peek(
        present,
        lambda w: (w.read("items", w.item(key, Item.NEXT)), w.read("items", w.item(key, Item.PREVIOUS))),
        work,
        ("items",),
        (0, 0),
    )
    work = work.write_if(present, "items", after, work.item(before, Item.NEXT))
    return work.write_if(present, "items", before, work.item(after, Item.PREVIOUS))


def touch(work: PooledWorkspace, present: Scalar, key: Scalar) -> PooledWorkspace:
    """Makes a key in the ring the most recently used, if `present`."""
    return append(unlink(work, present, key), present, key)

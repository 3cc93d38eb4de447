"""Eviction in order of use: whole keys leave, until enough blocks did (RTP-LLM without its prefix tree)."""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules.parameters import View
from hkv.dialects.rtp_llm.rules.shape import Shape
from hkv.state import item_table
from hkv.state.loops import Scalar, loop, peek
from hkv.state.pooled import Item, PoolCounter
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = item_table.WRITES
"""Arrays that eviction writes."""

ANY_GROUP = -1


def select(
    work: PooledWorkspace, view: View, group: Scalar, least: Scalar, keep: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes keys that are not resident out, the least recently used first, until `least` blocks left.

    RTP-LLM `selectAndEvict` and `selectAndEvictForGroup` of `SharedBlockCache`.

    Args:
      work: needs `WRITES` to write.
      view: the configuration.
      group: only keys with a block in this group leave, and only its blocks are counted; `ANY_GROUP` for all.
      least: blocks.
      keep: whether the blocks keep their references; keys and blocks are reported then.

    Returns:
      The workspace, how many blocks and how many keys left.
    """
    ring = work.ring
    work, (oldest,) = peek(least > 0, lambda w: (w.read("items", w.item(ring, Item.NEXT)),), work, ("items",), (ring,))

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        key, blocks, keys = local
        w, (after, flags, own) = peek(
            key >= 0,
            lambda v: (
                v.read("items", v.item(key, Item.NEXT)),
                v.read("items", v.item(key, Item.FLAGS)),
                v.read("items", v.cached(key, jnp.maximum(group, 0))),
            ),
            w,
            ("items",),
            (ring, 0, 0),
        )
        goes = ((flags & item_table.RESIDENT) == 0) & ((group < 0) | (own != 0))
        w, left = item_table.remove(w, goes, key, view.num_groups, view.pool_of, keep)
        return w, (after, blocks + jnp.where(group < 0, left, goes), keys + goes)

    work, (_, blocks, keys) = loop(lambda c: (c[0] != ring) & (c[1] < least), body, work, (oldest, 0, 0), writes=WRITES)
    return work, blocks, keys


def make_room(
    work: PooledWorkspace, view: View, shape: Shape, count: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Evicts until a group's pool has `count` free blocks (RTP-LLM `ensureFreeBlocks`).

    Args:
      work: needs `WRITES` to write.
      view: the configuration.
      shape: the group.
      count: blocks.
      enabled: whether to do it; False is returned where not.

    Returns:
      The workspace, and whether there are so many. What was evicted stays evicted in either case.
    """

    def look(w: PooledWorkspace, present: Scalar) -> tuple[PooledWorkspace, Scalar]:
        w, (free,) = peek(
            present,
            lambda v: (v.read("counters", v.pool_counter(shape.pool, PoolCounter.FREE)),),
            w,
            ("counters",),
            (0,),
        )
        return w, free

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        free, _ = local
        w, left, _ = select(w, view, shape.group, count - free, jnp.bool_(False))
        w, free = look(w, left > 0)
        return w, (free, left > 0)

    work, free = look(work, enabled)
    work, (free, _) = loop(lambda c: (c[0] < count) & c[1], body, work, (free, enabled), writes=WRITES)
    return work, enabled & (free >= count)

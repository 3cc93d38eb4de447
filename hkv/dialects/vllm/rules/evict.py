"""The eviction rules: takes keys away from blocks that are named, or from all.

vLLM 0.33 `BlockPool.evict_blocks` and `reset_prefix_cache`. References and the queue's order stay as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules.parameters import CacheField, View
from hkv.state import key_table, loops
from hkv.state.events import Event, emit
from hkv.state.loops import Scalar, loop
from hkv.state.workspace import Workspace

EVICT_WRITES = (*key_table.WRITES, "dropped")
"""Arrays that `evict` writes."""

RESET_WRITES = ("keys", "table", "events", "num_events")
"""Arrays that `reset` writes."""


def evict(
    work: Workspace, view: View, ids: jax.Array, start: Scalar, count: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """The named blocks lose their keys.

    Args:
      work: needs `EVICT_WRITES` to write.
      view: the configuration.
      ids: int32[n], block ids.
      start: place of the first one.
      count: number of them.
      enabled: whether to do it.

    Returns:
      The workspace, and how many ids were not blocks of the pool; those are dropped.
    """
    blocks = view.whole(CacheField.NUM_BLOCKS)

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        i, outside = local
        block = loops.read(ids, i)
        exists = (block >= 0) & (block < blocks)
        w = key_table.drop_keys(w, exists & (block > 0), jnp.where(exists, block, 0))
        return w, (i + 1, outside + ~exists)

    end = jnp.where(enabled, start + count, start)
    work, (_, outside) = loop(lambda c: c[0] < end, body, work, (start, 0), writes=key_table.WRITES)
    return work.replace(dropped=work.dropped + outside), outside


def reset(work: Workspace, view: View, enabled: Scalar) -> tuple[Workspace, Scalar]:
    """All blocks lose their keys, unless some block is in use.

    Args:
      work: needs `RESET_WRITES` to write.
      view: the configuration.
      enabled: whether to do it.

    Returns:
      The workspace, and whether it was done.
    """
    done = enabled & (work.free == view.whole(CacheField.NUM_BLOCKS) - 1)
    buckets = work.sizes.buckets

    def clear_keys(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        return w.write("keys", 0, w.key(0) + local[0]), (local[0] + 1,)

    def clear_table(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        entry, value = local
        w = w.write_if(value > 0, "table", key_table.absent(value), w.entry(entry - 1))
        return w, (entry + 1, w.read("table", w.entry(entry)))

    end = jnp.where(done, buckets.blocks * buckets.key_words, 0)
    work, _ = loop(lambda c: c[0] < end, clear_keys, work, (0,), writes=("keys",))
    end = jnp.where(done, work.spare_entry, -1)
    work, _ = loop(lambda c: c[0] <= end, clear_table, work, (0, 0), writes=("table",))
    return emit(work, done, Event.CLEARED), done

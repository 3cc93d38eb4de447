"""The retirement and release rules: gives back blocks that no later query can read, or all of them.

vLLM 0.33 `SingleTypeKVCacheManager.remove_skipped_blocks`, `MambaManager.remove_skipped_blocks` and `free`.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules import export, rows
from hkv.dialects.vllm.rules.admit import skipped_blocks
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.state import free_queue
from hkv.state.loops import Scalar, loop, peek
from hkv.state.state import Row
from hkv.state.workspace import Workspace

WRITES = ("rows", "keys", "requests", *free_queue.RELEASE_WRITES)
"""Arrays that the rules write; `keys` only in its spare element."""


def give_back(
    work: Workspace,
    view: View,
    slot: Scalar,
    processed: Scalar,
    everything: Scalar,
    follows: Scalar,
    enabled: Scalar,
) -> Workspace:
    """`free` if `everything` is given back, else `retire`: one loop serves both. Retirement begins after the sinks.

    Where a chunk `follows`, the state inside the last one is left to later registrations.
    """

    def body(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        (group,) = local
        w, (length, first, partial) = peek(
            group >= 0,
            lambda v: v.get_row(slot, group, Row.LENGTH, Row.FIRST, Row.PARTIAL),
            w,
            reads=("requests",),
            default=(0, 0, 0),
        )
        retired = jnp.maximum(jnp.minimum(skipped_blocks(view, group, processed), length), first)
        sinks = view.group(group, GroupField.SINKS)
        begin = jnp.where(everything, rows.start(view, group, first), jnp.maximum(first, sinks))
        w = free_queue.release(w, w.row(slot, group) + begin, jnp.where(everything, length, retired) - begin)
        w = rows.null(w, slot, group, begin, jnp.where((sinks > 0) & ~everything, retired, begin))
        w = w.set_row(slot, group, Row.FIRST, jnp.where(everything, 0, retired))
        w = w.set_row(slot, group, Row.LENGTH, jnp.where(everything, 0, length))
        gone = everything | ((partial <= retired) & (view.whole(CacheField.TAIL_OUTLIVES) == 0))
        w = w.set_row(slot, group, Row.PARTIAL, jnp.where(gone, 0, partial))
        left = jnp.where(everything, slot, w.spare_slot)
        w = export.leave(w, view, slot, group, follows)
        w = w.set_row(left, group, Row.STANDING, 0)
        return w.set_row(left, group, Row.CACHED, 0), (group + 1,)

    groups = jnp.where(enabled, view.num_groups, 0)
    return loop(lambda c: c[0] < groups, body, work, (0,), writes=WRITES)[0]


def clear_row(work: Workspace, slot: Scalar, group: Scalar) -> Workspace:
    """A request's row in a group as it is before the first allocation."""
    for field in (Row.LENGTH, Row.FIRST, Row.CACHED, Row.PARTIAL, Row.GROWN, Row.EXPORT, Row.STANDING):
        work = work.set_row(slot, group, field, 0)
    return work

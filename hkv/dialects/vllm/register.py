"""The registration rule: enters filled blocks into the prefix cache.

vLLM 0.33 `KVCacheCoordinator.cache_blocks`, `SingleTypeKVCacheManager.cache_blocks`, `BlockPool.cache_full_blocks`, and
`FullAttentionManager`'s prompt tail.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.hit import SNAPSHOT, hashed_keys
from hkv.dialects.vllm.parameters import CacheField, GroupField, View
from hkv.state import key_table
from hkv.state.events import Event, emit
from hkv.state.loops import Scalar, divide, loop, peek, remainder, when
from hkv.state.state import NOT_RETAINED, RETIRED, Request, Row
from hkv.state.workspace import Workspace

WRITES = ("rows", "chains", "requests", *key_table.WRITES)
"""What the rule writes; `rows` and `chains` only to their spare elements."""


def cacheable_tokens(view: View, group: Scalar, tokens: Scalar) -> Scalar:
    """Tokens of a group that may be registered when `tokens` are computed.

    vLLM 0.33 `get_num_cacheable_tokens`: of a hybrid only lengths to which hits are aligned, and a block more where a hit
    drops a block; of a single group all but what may be prefilled again.
    """
    certain = jnp.maximum(tokens - view.whole(CacheField.REPREFILLABLE), 0)
    alignment = view.whole(CacheField.ALIGNMENT)
    aligned = tokens - remainder(tokens, alignment)
    eagle = (view.group(group, GroupField.EAGLE) != 0) & (aligned > 0)
    block = view.group(group, GroupField.BLOCK)
    more = jnp.minimum(certain, certain - remainder(certain, alignment) + block)
    hybrid = jnp.where(eagle, more, aligned)
    return jnp.where(view.whole(CacheField.UNITARY) != 0, certain, hybrid)


def register(work: Workspace, view: View, slot: Scalar, tokens: Scalar, enabled: Scalar) -> Workspace:
    """Every group registers those of a request's blocks that its first `tokens` tokens fill.

    Args:
      work: needs `WRITES` to write.
      view: the configuration.
      slot: the request.
      tokens: tokens that are computed and certain.
      enabled: whether to do it.
    """
    enabled = enabled & (view.whole(CacheField.CACHING) != 0)
    work, (length, prompt, keys) = peek(
        enabled,
        lambda w: tuple(w.request(slot, field) for field in (Request.TOKENS, Request.PROMPT, Request.KEYS)),
        work,
        reads=("requests",),
        default=(0, 0, 0),
    )
    keys = hashed_keys(view, length, keys)

    def body(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        (group,) = local
        w, (done, first, rows) = peek(
            group >= 0,
            lambda v: tuple(v.row(slot, group, field) for field in (Row.CACHED, Row.FIRST, Row.LENGTH)),
            w,
            reads=("requests",),
            default=(0, 0, 0),
        )
        cacheable = jnp.where(view.group(group, GroupField.CACHEABLE) != 0, cacheable_tokens(view, group, tokens), 0)
        block, scale = view.group(group, GroupField.BLOCK), view.group(group, GroupField.SCALE)
        full = jnp.minimum(divide(cacheable, block), divide(keys, scale))
        w = when(
            full > done,
            lambda v: _whole_blocks(v, view, slot, group, done, full, first),
            w,
            writes=WRITES,
        )
        tail = (view.group(group, GroupField.TAIL) != 0) & (cacheable > 0)
        if w.keys.shape[2] > 1:
            w = when(
                tail,
                lambda v: _prompt_tail(v, view, slot, group, cacheable, prompt, keys, rows),
                w,
                writes=WRITES,
            )
        return w, (group + 1,)

    groups = jnp.where(enabled, view.num_groups, 0)
    return loop(lambda c: c[0] < groups, body, work, (0,), writes=WRITES)[0]


def _whole_blocks(
    work: Workspace, view: View, slot: Scalar, group: Scalar, done: Scalar, full: Scalar, first: Scalar
) -> Workspace:
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups = work.table.shape[2]
    spare = work.table.shape[1] - 1
    period, keep = view.group(group, GroupField.PERIOD), view.group(group, GroupField.KEEP)
    shift = view.group(group, GroupField.EAGLE)
    all_kept = period == 0
    recurrent = view.group(group, GroupField.KIND) == SNAPSHOT
    period = jnp.maximum(period, 1)

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, block, key, value, held, why = local
        entry = key * groups + column
        slow = (block != 0) & ((value > 0) | (held != 0))
        fast = (block != 0) & ~slow
        reason = jnp.where(value > 0, (value & ~6) - 2 * (why + 1), why)
        w = w.write("table", jnp.where(fast, block * 8, reason), jnp.where(fast | (why < 0), key, spare), column)
        w = w.write("table", w.steps, jnp.where(recurrent & (block != 0), key, spare), groups - 1)
        w = w.write("keys", jnp.where(fast, (entry + 1) * 2, 0), jnp.where(fast, block, 0), 0)
        w = when(
            slow,
            lambda v: key_table.add_key(key_table.drop_keys(v, held != 0, block), slow, block, jnp.int32(0), entry),
            w,
            writes=key_table.WRITES,
        )
        w = emit(w, block != 0, Event.KEY, entry)
        more = i < full
        j = jnp.where(more, i, done)
        phase = remainder(jnp.maximum(j - shift, 0), period)
        kept = all_kept | ((j >= shift) & (phase >= period - keep))
        block = jnp.where(j >= first, w.read("rows", slot, group, j), 0)
        why = jnp.where(more, jnp.where(block == 0, RETIRED, jnp.where(kept, 0, NOT_RETAINED)), 0)
        block = jnp.where(more & (why == 0), block, 0)
        key = w.read("chains", slot, (j + 1) * scale - 1)
        return w, (i + 1, block, key, w.read("table", key, column), w.read("keys", block, 0), why)

    work, _ = loop(
        lambda c: c[0] <= full,
        body,
        work,
        (done, 0, spare, 0, 0, 0),
        reads=("rows", "chains"),
        writes=key_table.WRITES,
    )
    work = emit(work, full > done, Event.STORED + 8 * slot, group, done, full)
    work = work.set_row(slot, group, Row.CACHED, full)
    return work.set_request(slot, Request.KNOWN, 1)


def _prompt_tail(
    work: Workspace,
    view: View,
    slot: Scalar,
    group: Scalar,
    cacheable: Scalar,
    prompt: Scalar,
    keys: Scalar,
    rows: Scalar,
) -> Workspace:
    """Registers the last hash block of the prompt that ends inside a manager block, where it does not yet."""
    hash_block = view.whole(CacheField.HASH_BLOCK)
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups = work.table.shape[2]
    last = jnp.where(view.group(group, GroupField.EAGLE) != 0, prompt, jnp.maximum(prompt - 1, 0))
    units = jnp.minimum(divide(last, hash_block), keys)
    index, part = divide(units, scale), remainder(units, scale)
    wanted = (units > 0) & (units * hash_block <= cacheable) & (part != 0) & (index < rows)
    work, (block, key) = peek(
        wanted,
        lambda w: (w.read("rows", slot, group, index), w.read("chains", slot, units - 1)),
        work,
        reads=("rows", "chains"),
        default=(0, 0),
    )
    wanted = wanted & (block != 0)
    entry = key * groups + column
    work, (held,) = peek(wanted, lambda w: (w.read("keys", block, part),), work, reads=("keys",), default=(0,))
    wanted = wanted & (held != entry + 1)
    work, highest = key_table.highest_part(work, wanted, block)
    work = key_table.drop_keys(work, wanted & (highest > 0) & (highest < part), block)
    work = key_table.add_key(work, wanted, block, part, entry)
    work = emit(work, wanted, Event.KEY, entry)
    end = units * hash_block
    return emit(work, wanted, Event.STORED_PART + 8 * slot, group, end - hash_block, end)

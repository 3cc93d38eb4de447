"""RTP-LLM's older cache, compiled: one block for each key and group, the pairs in order of use, no references.

RTP-LLM `BlockCache`, which `SharedBlockCache` replaces: no allocator uses it any more, so no operation of a log reaches
it. Each function takes the state, which is donated, and returns the new one first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import ConfigError
from hkv.state import item_table
from hkv.state.loops import Scalar, divide, loop, peek
from hkv.state.pooled import ITEM_WORDS, Item, PooledBuckets
from hkv.state.pooled_workspace import ARRAYS, OUTPUTS, PooledSizes, PooledWorkspace

BLOCK = 0
"""A pair has one block: that of this group in its item."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LegacyState:
    """State of the cache. Immutable; donate it to the operation that replaces it.

    Attributes:
      items: int32[keys * groups + 2, 9], an item for each pair of a key and a group (`hkv.state.pooled.Item`), numbered
        `key * groups + group`, linked in order of use, with its block; row `keys * groups` is the ring's beginning.
      groups: int32[], number of groups.
    """

    items: jax.Array
    groups: jax.Array


def init(keys: int, groups: int) -> LegacyState:
    """An empty cache of keys 0 to `keys` - 1, as NumPy arrays.

    Raises ConfigError for a size below 1, or more pairs than one array can hold.
    """
    for name, value in (("keys", keys), ("groups", groups)):
        if type(value) is not int or value < 1:
            raise ConfigError(name, value, "a positive integer")
    pairs = keys * groups
    if (pairs + 2) * (ITEM_WORDS + 1) >= 1 << 30:
        raise ConfigError("keys", keys, "fewer, so that the array has less than 2**30 elements")
    items = np.zeros((pairs + 2, ITEM_WORDS + 1), np.int32)
    items[pairs, [Item.NEXT, Item.PREVIOUS]] = pairs
    return LegacyState(items=items, groups=np.int32(groups))  # type: ignore[arg-type]


@functools.partial(jax.jit, donate_argnums=0)
def put(state: LegacyState, key: Any, group: Any, block: Any, resident: Any) -> tuple[LegacyState, jax.Array]:
    """Enters a block, unless the pair has one, which then only counts as used; bool[]: it was entered."""
    work, pair = _work(state, 0), key * state.groups + group
    work, (flags, *seen) = _look(work, pair)
    known = flags != 0
    work = item_table.use(work, jnp.bool_(True), known, pair, seen)
    word = item_table.PRESENT + item_table.RESIDENT * jnp.asarray(resident)
    work = work.write_if(~known, "items", word, work.item(pair, Item.FLAGS))
    work = work.write_if(~known, "items", block, work.cached(pair, BLOCK))
    return _state(work, state), ~known


@functools.partial(jax.jit, donate_argnums=0)
def match(state: LegacyState, key: Any, group: Any) -> tuple[LegacyState, jax.Array]:
    """The block of a pair, int32[], -1 for none; it counts as used."""
    work, pair = _work(state, 0), key * state.groups + group
    work, (flags, *seen) = _look(work, pair)
    work, (block,) = peek(flags != 0, lambda w: (w.read("items", w.cached(pair, BLOCK)),), work, ("items",), (NULL,))
    return _state(item_table.use(work, flags != 0, flags != 0, pair, seen), state), block


@functools.partial(jax.jit, donate_argnums=0, static_argnames="room")
def pop(state: LegacyState, count: Any, *, room: int) -> tuple[LegacyState, jax.Array, jax.Array]:
    """Takes at most `count` blocks out, the least recently used first, resident ones never.

    Returns int32[room], the blocks, and int32[], how many, those beyond the room included.
    """
    work = _work(state, room)

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        pair, left = local
        w, (flags, after, _, _) = _look(w, pair)
        goes = (flags & item_table.RESIDENT) == 0
        w = _take_out(w, pair, goes)
        return w, (after, left - goes)

    ring = work.ring
    work, (oldest,) = _oldest(work)
    writes = ("items", "ids", "num_ids")
    work, _ = loop(lambda c: (c[0] != ring) & (c[1] > 0), body, work, (oldest, count), writes=writes)
    return _state(work, state), work.ids[:-1], work.num_ids


@functools.partial(jax.jit, donate_argnums=0, static_argnames="room")
def select_and_evict(state: LegacyState, least: Any, *, room: int) -> tuple[LegacyState, jax.Array, jax.Array]:
    """Takes whole keys out, the least recently used first, until `least` blocks are out; always one key at least.

    A key is as old as the oldest of its pairs. Keys with any resident block stay. Returns int32[room], for each block
    its key and the block, and int32[], how many integers, those beyond the room included.
    """
    work, groups = _work(state, room), state.groups

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        pair, taken = local
        key = divide(pair, groups)
        w, stays = _any_resident(w, key * groups, groups)
        w, after = _after_key(w, pair, key, groups)

        def evict(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            group, out = at
            one = key * groups + group
            v, (flags, *_) = _look(v, one)
            v = _take_out(v.emit(key, flags != 0), one, flags != 0)
            return v, (group + 1, out + (flags != 0))

        end = jnp.where(stays, 0, groups)
        w, (_, taken) = loop(lambda c: c[0] < end, evict, w, (0, taken), writes=("items", "ids", "num_ids"))
        return w, (after, taken)

    ring = work.ring
    work, (oldest,) = _oldest(work)
    enough = jnp.maximum(least, 1)
    writes = ("items", "ids", "num_ids")
    work, _ = loop(lambda c: (c[0] != ring) & (c[1] < enough), body, work, (oldest, 0), writes=writes)
    return _state(work, state), work.ids[:-1], work.num_ids


def _work(state: LegacyState, room: int) -> PooledWorkspace:
    buckets = PooledBuckets(
        blocks=1, groups=1, pools=1, requests=1, sequences=1, row=1, chain=1, keys=state.items.shape[0] - 2
    )
    arrays: dict[str, Any] = dict.fromkeys((*ARRAYS, *OUTPUTS))
    arrays |= {"items": state.items.reshape(-1), "ids": jnp.zeros(room + 1, jnp.int32)}
    return PooledWorkspace(PooledSizes(buckets, 1, 1, 1, room), **arrays, lane=jnp.int32(0), num_ids=jnp.int32(0))


def _state(work: PooledWorkspace, state: LegacyState) -> LegacyState:
    return LegacyState(items=work.items.reshape(state.items.shape), groups=state.groups)


def _oldest(work: PooledWorkspace) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
    ring = work.ring
    return work.peek(jnp.bool_(True), "items", work.item(ring, Item.NEXT))


def _look(work: PooledWorkspace, pair: Scalar) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
    """A pair's flags, and what `item_table.use` wants to know, the pair used after it first."""
    places = work.item(pair, Item.FLAGS), *item_table.neighbours(work, pair)
    return work.peek(jnp.asarray(pair) >= 0, "items", *places)


def _take_out(work: PooledWorkspace, pair: Scalar, present: Scalar) -> PooledWorkspace:
    """Takes a pair out and reports its block, if `present`."""
    work, (block,) = work.peek(present, "items", work.cached(pair, BLOCK))
    work = item_table.unlink(work, present, pair)
    return work.write_if(present, "items", 0, work.item(pair, Item.FLAGS)).emit(block, present)


def _any_resident(work: PooledWorkspace, first: Scalar, groups: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """True if one of a key's blocks is never evicted."""

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, found = local
        flags = w.read("items", w.item(first + group, Item.FLAGS))
        return w, (group + 1, found | ((flags & item_table.RESIDENT) != 0))

    work, (_, found) = loop(lambda c: (c[0] < groups) & ~c[1], body, work, (0, False), reads=("items",))
    return work, found


def _after_key(work: PooledWorkspace, pair: Scalar, key: Scalar, groups: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """The pair that was used next after a given one and is of another key."""
    ring = work.ring

    def body(w: PooledWorkspace, local: tuple[Scalar]) -> tuple[PooledWorkspace, tuple[Scalar]]:
        return w, (w.read("items", w.item(local[0], Item.NEXT)),)

    work, (after,) = loop(
        lambda c: (c[0] != ring) & (divide(c[0], groups) == key), body, work, (pair,), reads=("items",)
    )
    return work, after

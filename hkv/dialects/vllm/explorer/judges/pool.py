"""Judges of the pool, the queue and the keys: where every block is, in which order, and what it is said to hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.judges.rows import Moment, judge
from hkv.dialects.vllm.explorer.moves import Fact
from hkv.dialects.vllm.explorer.picture import Picture, of_blocks
from hkv.dialects.vllm.rules.operations import Code
from hkv.state.status import Status

RESTING = (
    *(Code.STEP, Code.REQUEST, Code.LOOKUP, Code.ADVANCE, Code.APPEND, Code.COMMIT),
    *(Code.DROP, Code.EVICT, Code.RESET),
)
"""Operations that hand out and take back no block."""

REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may be refused."""


@judge("totality")
def totality(m: Moment) -> jax.Array:
    """Every legal operation is performed, or refused for a reason that it may be refused for; who is granted blocks has
    some."""
    refused = jnp.zeros((), bool)
    for status in REFUSALS:
        refused = refused | (m.status == int(status))
    fine = m.granted | (m.move.is_a(Code.ALLOCATE) & refused)
    fine = fine | (m.move.is_a(Code.RESET) & (m.status == int(Status.IN_USE)))
    return ~fine | (m.move.is_a(Code.ALLOCATE) & m.granted & ~jnp.any(_mine(m, m.after.lengths) > 0))


@judge("conservation")
def conservation(m: Moment) -> jax.Array:
    """Every block but the null block is either queued, once, or referenced."""
    queued, refs = m.after.queued[1:], m.after.refs[1:]
    return jnp.any((queued > 1) | ((queued > 0) == (refs > 0)))


@judge("references")
def references(m: Moment) -> jax.Array:
    """A block has one reference for each place in a row. The null block has none, which `null block` judges."""
    return jnp.any(places(m.after)[1:] != m.after.refs[1:])


def places(picture: Picture) -> jax.Array:
    """int32[B], how many places in rows name each block."""
    ids = np.arange(picture.refs.shape[0])
    return jnp.sum((picture.rows[..., None] == ids) & (ids > 0), axis=(0, 1, 2))


@judge("ownership")
def ownership(m: Moment) -> jax.Array:
    """A block that several places name is the same full block of the same prefix: same group, same column."""
    rows = m.after.rows
    ids = np.arange(1, m.after.refs.shape[0])
    named = rows[..., None] == ids
    spots = jnp.any(named, axis=0)
    scattered = jnp.sum(spots, axis=(0, 1)) > 1
    owners = jnp.sum(named, axis=0)
    ends = (np.arange(rows.shape[2]) + 1) * m.define.sizes[:, None]
    known = ends <= m.space.config.max_model_len
    names = m.prefixes[:, np.where(known, ends, 0)]
    names = jnp.where(known, names, -1)[..., None]
    low = jnp.min(jnp.where(named, names, 1 << 30), axis=0)
    high = jnp.max(jnp.where(named, names, -1), axis=0)
    differ = (owners > 1) & ((low != high) | (low < 0))
    several = jnp.sum(named, axis=(0, 1, 2)) > 1
    return jnp.any(several & (scattered | jnp.any(differ, axis=(0, 1))))


@judge("null block")
def null_block(m: Moment) -> jax.Array:
    """Block 0 is never referenced or cached, and never stands in a row where every token is always read."""
    at = np.arange(m.after.rows.shape[2])
    inside = at < m.after.lengths[:, :, None]
    missing = (m.after.rows == 0) & inside
    ends = -(-m.after.hits[:, None] // m.define.sizes)
    gap = (m.after.found == 0) & (at < ends[:, :, None]) & m.mine[:, None, None] & m.move.is_a(Code.LOOKUP)
    wrong = jnp.any((missing | gap) & m.define.whole)
    return wrong | (m.after.refs[0] > 0) | (m.after.key[0] > 0)


@judge("eviction order")
def eviction_order(m: Moment) -> jax.Array:
    """Blocks are handed out from the front; those without a key come back to the front, cached ones to the back."""
    still = jnp.any(m.before.place != m.after.place)
    everything = jnp.where(m.mine[:, None, None], m.before.rows, 0)
    whole = _given_back(m, jnp.sum(everything, axis=0))
    freed = _differs(m, whole, jnp.zeros_like(m.before.cached)) | (jnp.sum(_queue(m, whole)) != m.after.free)
    mine_before = jnp.sum(everything, axis=0)
    mine_after = jnp.sum(jnp.where(m.mine[:, None, None], m.after.rows, 0), axis=0)
    ids = np.arange(m.before.refs.shape[0])
    left = ~jnp.any(mine_after[..., None] == ids, axis=(0, 1))
    common = np.arange(mine_before.shape[1]) < _mine(m, m.after.lengths)[:, None]
    outgrown = (mine_before > 0) & (mine_before != mine_after) & of_blocks(mine_before, left) & common
    given = _given_back(m, jnp.where(outgrown, mine_before, 0))
    kept = (m.before.queued > 0) & m.before.cached & (m.after.refs > 0)
    same = (m.after.key == m.before.key) & (m.after.group == m.before.group)
    adopted = kept & same & (m.adopted > 0)
    strokes = jnp.any(outgrown) & m.recurrent
    short = jnp.sum(_queue(m, given) & ~adopted) < m.after.free
    allocated = short | (_differs(m, given, adopted) & ~strokes)
    return (m.move.is_a(*RESTING) & still) | (m.move.is_a(Code.FREE) & freed) | (m.move.is_a(Code.ALLOCATE) & allocated)


def _mine(m: Moment, values: jax.Array) -> jax.Array:
    """The row of `values` that belongs to the operation's slot."""
    chosen = m.mine.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.sum(jnp.where(chosen, values, 0), axis=0)


def _given_back(m: Moment, cells: jax.Array) -> jax.Array:
    """Place of each block in the queue after `cells` were given back group by group, the last column first.

    Returns:
      int32[B]: the smaller, the nearer to the front; `FAR` and more for blocks that do not come back.
    """
    groups, width = cells.shape
    ids = np.arange(m.before.refs.shape[0])
    depth = width - 1 - np.arange(width)
    front = -(np.arange(groups)[:, None] + 1) * width + depth
    back = len(ids) + np.arange(groups)[:, None] * width + depth
    named = (cells[..., None] == ids) & (ids > 0)
    place = jnp.where(m.before.cached, back[..., None], front[..., None])
    last = jnp.any(named, axis=(0, 1)) & (m.before.refs == jnp.sum(named, axis=(0, 1)))
    return jnp.where(last, jnp.sum(jnp.where(named, place, 0), axis=(0, 1)), m.before.place)


def _queue(m: Moment, places: jax.Array) -> jax.Array:
    """bool[B], blocks that stand in the queue at those places."""
    return (places < m.before.refs.shape[0] * 8 + 256) & (np.arange(places.shape[0]) > 0)


def _differs(m: Moment, given: jax.Array, adopted: jax.Array) -> jax.Array:
    """True if the queue is not the end of the one that those places describe, adopted blocks left out."""
    stands = _queue(m, given) & ~adopted
    ahead = (given[None, :] < given[:, None]) & stands[None, :]
    rank = jnp.sum(ahead, axis=1)
    taken = jnp.sum(stands) - m.after.free
    wanted = jnp.where(stands & (rank >= taken), rank - taken, -1)
    found = jnp.where(m.after.queued > 0, m.after.place, -1)
    return (taken < 0) | jnp.any(wanted != found)


@judge("release")
def release(m: Moment) -> jax.Array:
    """A request that leaves keeps only cached blocks behind; a reset succeeds exactly when nothing is referenced."""
    still_there = jnp.any(_mine(m, m.after.lengths) > 0)
    others = ~m.mine[:, None]
    moved = jnp.any((m.before.lengths != m.after.lengths) & others)
    moved = moved | jnp.any((m.before.rows != m.after.rows) & others[:, :, None])
    spare = jnp.any(m.before.refs - places(m.before) != m.after.refs - places(m.after))
    leaves = m.move.is_a(Code.FREE, Code.DROP) & (still_there | moved | spare)
    wrong = (m.granted != ~jnp.any(m.before.refs > 0)) | (m.granted & jnp.any(m.after.cached))
    return leaves | (m.move.is_a(Code.RESET) & wrong)


@judge("index")
def index(m: Moment) -> jax.Array:
    """The key of a block in a row names what the row's owner has there: its group, its column, its tokens."""
    config, unit = m.space.config, m.space.config.hash_block_size
    whole = np.arange(unit, config.max_model_len + 1, unit)
    odd = jnp.any(m.after.cached & ~jnp.any(m.after.key[:, None] >> whole == 1, axis=1))
    keys, groups = of_blocks(m.after.rows, m.after.key), of_blocks(m.after.rows, m.after.group)
    ends = np.arange(config.max_model_len + 1)
    column = np.arange(keys.shape[2])[:, None]
    sizes = m.define.sizes[:, None, None]
    inside = (column * sizes < ends) & (ends <= (column + 1) * sizes)
    names = m.prefixes[:, None, None, :]
    right = jnp.any((names == keys[..., None]) & inside, axis=-1)
    mine = groups == np.arange(keys.shape[1])[:, None]
    return odd | jnp.any((m.after.rows > 0) & (keys > 0) & ~(right & mine))


@judge("key life")
def key_life(m: Moment) -> jax.Array:
    """Keys come when blocks are filled and go when blocks are handed out, evicted or reset; only then."""
    before, after = m.before, m.after
    changed = (before.key != after.key) | (before.group != after.group)
    lost, gained = changed & before.cached, changed & after.cached
    ids = np.arange(before.refs.shape[0])
    wanted = before.cached & (m.move.is_a(Code.EVICT) & (ids == m.move.value) | m.move.is_a(Code.RESET) & m.granted)
    named = jnp.any(gained) | jnp.any(lost != wanted)
    taken = (before.queued > 0) & (after.queued == 0)
    own = jnp.any(_mine(m, before.rows)[..., None] == ids, axis=(0, 1))
    strange = jnp.any(lost & ~taken & ~own)
    same = (after.key[:, None] == before.key) & (after.group[:, None] == before.group)
    fresh = gained & ~jnp.any(same & before.cached & own, axis=1)
    late = m.move.is_a(Code.ALLOCATE) & (m.move.extra != 0) & jnp.any(fresh)
    nobodys = jnp.any(fresh & (places(after) == 0))
    filling = m.move.is_a(Code.ALLOCATE, Code.COMMIT)
    return jnp.where(filling, strange | late | nobodys, named)


@judge("registration")
def registration(m: Moment) -> jax.Array:
    """Keys come to blocks that a hit may end in and nobody fills again; full attention's all get theirs at once."""
    longest, unit = m.space.config.max_model_len, m.space.config.hash_block_size
    length, computed = (jnp.sum(jnp.where(m.mine, m.ledger[:, fact], 0)) for fact in (Fact.LENGTH, Fact.COMPUTED))
    total = computed + m.adopted
    tokens = jnp.where(m.move.is_a(Code.ALLOCATE), jnp.minimum(total + m.move.value, length), computed)
    limit = jnp.asarray(m.define.registrable)[:, jnp.clip(tokens, 0, longest)]
    before, after = m.before, m.after
    moved = jnp.any((after.key[:, None] == before.key) & (after.group[:, None] == before.group), axis=1)
    covered = jnp.sum(after.key[:, None] >> np.arange(1, longest + 1) > 0, axis=1)
    fresh = after.cached & ~moved
    beyond = jnp.any(fresh[:, None] & (after.group[:, None] == np.arange(len(limit))) & (covered[:, None] > limit))
    ends = jnp.minimum(limit, length // unit * unit)
    at = np.arange(after.rows.shape[2])
    first = -(-(total + 1) // m.define.sizes) - 1
    due = (at >= first[:, None]) & (at < (ends // m.define.sizes)[:, None]) & m.define.family[:, None]
    unknown = jnp.any(due & ~of_blocks(_mine(m, after.rows), after.cached))
    at_once = m.move.is_a(Code.ALLOCATE) & m.granted & (m.move.extra == 0) & (m.define.dense)
    return m.move.is_a(Code.ALLOCATE, Code.COMMIT) & (beyond | (at_once & unknown))


@judge("key table")
def key_table(m: Moment) -> jax.Array:
    """The table in which lookups search leads to exactly the blocks that have keys."""
    return ~m.after.listed

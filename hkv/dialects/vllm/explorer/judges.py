"""The invariants, each as a function of one operation with the cache before and after it. One lane; `vmap` makes many.

They are the array form of `hkv.dialects.vllm.invariants`, which see one state at a time and are their twins: a property
test holds them to the same verdict, invariant by invariant. `monotonicity` is not among them: it follows from
`soundness`, `maximality` and `draft margin` wherever hits are exactly as defined. `identity` holds by construction:
keys are made from content here. `shadow tags` and `event index` need a history, which states do not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.moves import LOOKED_UP, ExplorerMove, Fact, follow, prefixes
from hkv.dialects.vllm.explorer.picture import Picture, of_blocks
from hkv.dialects.vllm.explorer.space import Definitions, Space
from hkv.dialects.vllm.rules.operations import Code
from hkv.state.status import Status

# Argument of the judges: one operation with the cache before and after it; and the register of judges.


@dataclasses.dataclass(frozen=True)
class Moment:
    """Operation to judge, with the cache before and after it.

    Attributes:
      space: the space.
      define: its definitions.
      move: the operation.
      status: status that the cache answered.
      before, after: the cache.
      ledger_before, ledger: state of every request, as the operations alone tell it.
      shared_prefix: longest prefix that the search came to, as a lookup reported it.
    """

    space: Space
    define: Definitions
    move: ExplorerMove
    status: jax.Array
    before: Picture
    after: Picture
    ledger_before: jax.Array
    ledger: jax.Array
    shared_prefix: jax.Array

    @property
    def granted(self) -> jax.Array:
        """True if nothing was refused."""
        return self.status == int(Status.OK)

    @property
    def adopted(self) -> jax.Array:
        """Tokens of the hit that an ALLOCATE adopts."""
        looked = self.ledger_before[self.move.slot, Fact.FOCUS] == LOOKED_UP
        return jnp.where(looked, self.before.hits[self.move.slot], 0)

    @property
    def mine(self) -> jax.Array:
        """bool[R], the slot of the operation."""
        return jnp.arange(self.ledger.shape[0]) == self.move.slot

    @property
    def prefixes(self) -> jax.Array:
        """int32[R, L + 1], `hkv.dialects.vllm.explorer.moves.prefixes` after the operation."""
        config = self.space.config
        return prefixes(self.ledger, config.hash_block_size, config.max_model_len)

    @property
    def held_before(self) -> jax.Array:
        """bool[R], requests that hold rows before the operation."""
        return jnp.any(self.before.lengths > 0, axis=1)

    @property
    def recurrent(self) -> bool:
        """True if some group has recurrent states."""
        return bool(self.define.snapshot.any())


def moment_of(
    space: Space,
    define: Definitions,
    move: ExplorerMove,
    answer: tuple[jax.Array, jax.Array],
    pictures: tuple[Picture, Picture],
    ledger: jax.Array,
) -> Moment:
    """The moment of one operation.

    Args:
      space: the space.
      define: its definitions.
      move: the operation.
      answer: its status, and the longest prefix of the search of a lookup.
      pictures: the cache before and after it.
      ledger: before it.
    """
    looked = ledger[move.slot, Fact.FOCUS] == LOOKED_UP
    hit = jnp.where(move.is_a(Code.ALLOCATE) & looked, pictures[0].hits[move.slot], 0)
    new = follow(ledger, move, hit, answer[0])
    return Moment(space, define, move, answer[0], *pictures, ledger, new, answer[1])


Judge = Callable[[Moment], jax.Array]
"""True if an invariant is broken, a bool."""

JUDGES: dict[str, Judge] = {}
"""Every judge, by the name of its invariant."""


def judge(name: str) -> Callable[[Judge], Judge]:
    """Enters a judge into `JUDGES`."""

    def enter(function: Judge) -> Judge:
        JUDGES[name] = function
        return function

    return enter


# Rows and hits: as long as they must be, holding what can still be read; all that can be resumed from.


@judge("retirement")
def retirement(m: Moment) -> jax.Array:
    """A block has left the row if and only if no token still to be processed can read it."""
    processed = jnp.clip(_fact(m, Fact.PROCESSED), 0, m.space.config.max_model_len)
    row, lengths = _row(m, m.after.rows), _row(m, m.after.lengths)
    outgrown = jnp.asarray(m.define.outgrown)[:, processed]
    inside = np.arange(row.shape[1]) < lengths[:, None]
    kept = jnp.any(outgrown & inside & (row > 0))
    gone = ~outgrown & inside & (row == 0)
    exempt = (m.define.snapshot | m.define.off_grid)[:, None]
    return m.move.is_a(Code.ALLOCATE) & ((m.granted & kept) | jnp.any(gone & ~exempt))


@judge("room")
def room(m: Moment) -> jax.Array:
    """A row has exactly the columns for the most tokens it was granted."""
    columns = jnp.where(m.define.opaque, 1, -(-_fact(m, Fact.MAIN) // m.define.sizes))
    lengths = _row(m, m.after.lengths)
    return m.move.is_a(Code.ALLOCATE) & m.granted & jnp.any(lengths != columns)


@judge("admission")
def admission(m: Moment) -> jax.Array:
    """A refusal takes nothing, only what does not fit is refused, and a grant leaves free what was to stay free."""
    define, adopted = m.define, m.adopted
    waiting = ~jnp.any(_row(m, m.before.lengths) > 0)
    busy = jnp.any(m.held_before & ~m.mine)
    spared = jnp.where(waiting & busy, define.watermark, 0)
    crowded = (m.after.free < spared) & (waiting | (not m.recurrent))
    changed = jnp.any((m.before.key != m.after.key) | (m.before.group != m.after.group))
    others = ~m.mine[:, None]
    theirs = jnp.any((m.before.lengths != m.after.lengths) & others)
    theirs = theirs | jnp.any((m.before.rows != m.after.rows) & others[:, :, None])
    old, new = _row(m, m.before.rows), _row(m, m.after.rows)
    rewritten = jnp.any((new != old) & (new != 0)) | jnp.any(_row(m, m.before.lengths) != _row(m, m.after.lengths))
    changed = changed | jnp.where(waiting, ~m.before.same(m.after), theirs | rewritten)
    slots = jnp.minimum(_fact(m, Fact.COMPUTED) + adopted + m.move.value, m.space.config.max_model_len)
    columns = jnp.where(define.opaque, 1, -(-slots // define.sizes))
    needed = jnp.sum(jnp.maximum(columns - _row(m, m.before.lengths), 0))
    tokens = jnp.maximum(slots, _fact(m, Fact.LENGTH))
    most = jnp.sum(-(-tokens // define.sizes) + 4)
    needs = jnp.where((adopted > 0) | m.recurrent, most, needed)
    excused = (adopted > 0) & m.recurrent
    eager = (m.after.free - spared >= needs) & ~excused
    return m.move.is_a(Code.ALLOCATE) & jnp.where(m.granted, crowded, changed | eager)


@judge("hit admission")
def hit_admission(m: Moment) -> jax.Array:
    """A waiting request is granted blocks if and only if those it needs are free besides those set aside.

    With Mamba groups only refusals are judged, by a bound that no rule can exceed, and none of those of a hit.
    """
    waiting = ~jnp.any(_row(m, m.before.lengths) > 0)
    busy = jnp.any(m.held_before & ~m.mine)
    free = m.before.free - jnp.where(busy, m.define.watermark, 0)
    start, longest = m.adopted, m.space.config.max_model_len
    slots = jnp.minimum(start + m.move.value, longest)
    if m.recurrent:
        bound = jnp.sum(-(-slots // m.define.sizes) + 4)
        wrong = ~m.granted & (start == 0) & (free >= bound)
    else:
        skipped = jnp.asarray(m.define.outgrown)[:, jnp.clip(start, 0, longest)]
        found = _row(m, m.before.found) * (start > 0)
        at = np.arange(found.shape[1])
        queued = of_blocks(found, m.before.refs == 0) & (found > 0) & ~skipped
        covered, columns = -(-start // m.define.sizes), -(-slots // m.define.sizes)
        new = (at >= covered[:, None]) & (at < columns[:, None]) & ~skipped
        costs = jnp.where(m.define.opaque, 1, jnp.sum(new, axis=1) + jnp.sum(queued, axis=1))
        wrong = m.granted != (jnp.sum(costs) <= free)
    return m.move.is_a(Code.ALLOCATE) & waiting & wrong


@judge("soundness")
def soundness(m: Moment) -> jax.Array:
    """At a hit of h tokens every group can resume: what the query at h reads is in blocks of this very prefix."""
    longest = m.space.config.max_model_len
    found = _row(m, m.after.found)
    keys, groups = of_blocks(found, m.after.key), of_blocks(found, m.after.group)
    keys = jnp.where((found > 0) & (groups == np.arange(found.shape[0])[:, None]), keys, 0)
    ends = np.arange(longest + 1)
    more = ends[None, :] - ends[:, None]
    cut = keys[:, :, None, None] >> np.maximum(more, 0)
    covers = (cut == _row(m, m.prefixes)[:, None]) & (more >= 0)
    covers = covers & ((more == 0) | ~m.define.snapshot[:, None, None, None])
    holds = jnp.any(covers, axis=-1)
    at_hit = ends == _row(m, m.after.hits)
    needed = jnp.any(m.define.needed & at_hit[:, None, None, None], axis=0)
    return m.move.is_a(Code.LOOKUP) & jnp.any(needed & ~holds)


def _defined(m: Moment) -> jax.Array:
    """The longest hit by its definition."""
    groups = np.arange(len(m.define.sizes))[:, None, None]
    there = (m.after.group == groups) & (m.after.key == _row(m, m.prefixes)[:, None]) & m.after.cached
    entries = jnp.any(there, axis=-1)
    satisfied = jnp.any(m.define.proofs & entries, axis=(2, 3)) | ~m.define.proven
    lengths = np.arange(len(m.define.aligned))
    possible = jnp.all(satisfied, axis=1) & m.define.aligned & (lengths < _fact(m, Fact.LENGTH))
    return jnp.max(jnp.where(possible, lengths, 0))


@judge("maximality")
def maximality(m: Moment) -> jax.Array:
    """No longer hit exists: the definition of a hit, tried at every length, finds none."""
    exempt = jnp.asarray(m.define.may_be_less)[_fact(m, Fact.LENGTH)]
    return m.move.is_a(Code.LOOKUP) & ~exempt & (_defined(m) > _row(m, m.after.hits))


@judge("draft margin")
def draft_margin(m: Moment) -> jax.Array:
    """No hit that may be one is longer than what is proven: an EAGLE group also holds the unit after it."""
    if not m.space.config.eagle_group_ids:
        return jnp.zeros((), bool)
    exempt = jnp.asarray(m.define.may_be_more)[_fact(m, Fact.LENGTH)]
    return m.move.is_a(Code.LOOKUP) & ~exempt & _may_be_hit(m) & (_defined(m) < _row(m, m.after.hits))


@judge("consistency")
def consistency(m: Moment) -> jax.Array:
    """A lookup changes nothing; its hit is aligned and leaves a token to compute."""
    short = (m.shared_prefix != 0) & (m.shared_prefix <= _row(m, m.after.hits))
    return m.move.is_a(Code.LOOKUP) & (~m.before.same(m.after) | ~_may_be_hit(m) | short)


def _may_be_hit(m: Moment) -> jax.Array:
    """True if the hit is aligned, and leaves the request's last token to compute."""
    hit = _row(m, m.after.hits)
    return jnp.any((np.arange(len(m.define.aligned)) == hit) & m.define.aligned & (hit < _fact(m, Fact.LENGTH)))


def _row(m: Moment, values: jax.Array) -> jax.Array:
    """The part of `values`, whose first axis is request slots, that belongs to the operation's."""
    return jnp.sum(jnp.where(m.mine.reshape(-1, *[1] * (values.ndim - 1)), values, 0), axis=0)


def _fact(m: Moment, fact: Fact) -> jax.Array:
    """Field of the ledger for the operation's request, after the operation."""
    return _row(m, m.ledger[:, fact])


# The pool, the queue and the keys: where every block is, in which order, and what it is said to hold.

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
    return ~fine | (m.move.is_a(Code.ALLOCATE) & m.granted & ~jnp.any(_row(m, m.after.lengths) > 0))


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
    common = np.arange(mine_before.shape[1]) < _row(m, m.after.lengths)[:, None]
    outgrown = (mine_before > 0) & (mine_before != mine_after) & of_blocks(mine_before, left) & common
    given = _given_back(m, jnp.where(outgrown, mine_before, 0))
    kept = (m.before.queued > 0) & m.before.cached & (m.after.refs > 0)
    same = (m.after.key == m.before.key) & (m.after.group == m.before.group)
    adopted = kept & same & (m.adopted > 0)
    strokes = jnp.any(outgrown) & m.recurrent
    short = jnp.sum(_queue(m, given) & ~adopted) < m.after.free
    allocated = short | (_differs(m, given, adopted) & ~strokes)
    return (m.move.is_a(*RESTING) & still) | (m.move.is_a(Code.FREE) & freed) | (m.move.is_a(Code.ALLOCATE) & allocated)


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
    still_there = jnp.any(_row(m, m.after.lengths) > 0)
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
    own = jnp.any(_row(m, before.rows)[..., None] == ids, axis=(0, 1))
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
    unknown = jnp.any(due & ~of_blocks(_row(m, after.rows), after.cached))
    at_once = m.move.is_a(Code.ALLOCATE) & m.granted & (m.move.extra == 0) & (m.define.dense)
    return m.move.is_a(Code.ALLOCATE, Code.COMMIT) & (beyond | (at_once & unknown))


@judge("key table")
def key_table(m: Moment) -> jax.Array:
    """The table in which lookups search leads to exactly the blocks that have keys."""
    return ~m.after.listed

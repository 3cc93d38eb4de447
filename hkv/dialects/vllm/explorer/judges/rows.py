"""Judges of rows and hits: as long as they must be, holding what can still be read; all that can be resumed from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact, Move, follow, prefixes
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
      shared_prefix: longest hit of a single group, as a lookup reported it.
    """

    space: Space
    define: Definitions
    move: Move
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
        return bool(self.define.recurrent.any())


def moment_of(
    space: Space,
    define: Definitions,
    move: Move,
    answer: tuple[jax.Array, jax.Array],
    pictures: tuple[Picture, Picture],
    ledger: jax.Array,
) -> Moment:
    """The moment of one operation.

    Args:
      space: the space.
      define: its definitions.
      move: the operation.
      answer: its status, and the single-group hit of a lookup.
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


@judge("retirement")
def retirement(m: Moment) -> jax.Array:
    """A block has left the row if and only if no token still to be processed can read it."""
    processed = jnp.clip(_fact(m, Fact.PROCESSED), 0, m.space.config.max_model_len)
    row, lengths = _row(m, m.after.rows), _row(m, m.after.lengths)
    outgrown = jnp.asarray(m.define.outgrown)[:, processed]
    inside = np.arange(row.shape[1]) < lengths[:, None]
    kept = jnp.any(outgrown & inside & (row > 0))
    gone = ~outgrown & inside & (row == 0)
    exempt = (m.define.recurrent | m.define.off_grid)[:, None]
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
    """A waiting request is granted blocks if and only if those it needs are free beside those set aside.

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

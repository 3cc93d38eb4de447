"""Judges of one operation with the cache before and after it, traced by JAX. Of one world; `vmap` makes it many.

They are the invariants that `hkv.dialects.vllm.invariants` declares over arrays, asked of a moment of traced arrays,
and two of what only a compiled cache has. `monotonicity` is not among them: it follows from `soundness`, `maximality`
and `draft margin` wherever hits are exactly as defined. `identity` holds by construction: keys are made from content
here. `shadow tags` and `event index` need a history, which states do not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm import invariants
from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact, Move, follow
from hkv.dialects.vllm.explorer.picture import Picture, of_blocks
from hkv.dialects.vllm.explorer.space import Definitions, Space
from hkv.dialects.vllm.invariants import arrays
from hkv.dialects.vllm.invariants.arrays import FAR, ArrayMoment, Declared, Wrong
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.rules.operations import Code
from hkv.state.status import Status

PERFORMED = (
    *(Code.REQUEST, Code.APPEND, Code.LOOKUP, Code.ALLOCATE, Code.ADVANCE, Code.COMMIT),
    *(Code.FREE, Code.DROP, Code.EVICT, Code.RESET, Code.STEP),
)
CODES = {getattr(oplog, f"{code.name.capitalize()}Op"): code for code in PERFORMED}
"""Operations that the explorer performs, by their names in logs."""

REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may be refused."""

FACTS = {
    "length": Fact.LENGTH,
    "computed": Fact.COMPUTED,
    "main": Fact.MAIN,
    "slots": Fact.MAIN,
    "processed": Fact.PROCESSED,
}
"""Columns of the explorer's ledger, by the names of a log's (`hkv.dialects.vllm.traffic.ledger.RequestRecord`)."""


@dataclasses.dataclass(frozen=True)
class Moment(ArrayMoment):
    """Operation to judge, with the cache before and after it, as `ArrayMoment` says.

    There are no tokens from elsewhere, none for an encoder and no look-ahead here, and nothing is set aside but the
    watermark. A gather is written as a comparison with every place: small, and vectorised over worlds.

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

    xp = jnp
    moment = None
    copies_states = diverged = answers_anew = False
    external = reserved = encoder = must_fit = 0

    config = property(lambda self: self.space.config)
    slot = property(lambda self: self.move.slot)
    width = property(lambda self: self.after.rows.shape[-1])
    granted = property(lambda self: self.status == int(Status.OK))
    new = property(lambda self: self.move.value)
    delay = property(lambda self: self.move.extra)
    settled = property(lambda self: self.fact("computed"))
    total = property(lambda self: self.fact("computed") + self.adopted)
    asked = property(lambda self: jnp.minimum(self.total + self.new, self.config.max_model_len))
    waiting = property(lambda self: ~jnp.any(self.mine(self.before.lengths) > 0))
    waits = waiting
    hit = property(lambda self: self.mine(self.after.hits))
    found = property(lambda self: self.mine(self.after.found))
    covered = property(lambda self: self.blocks_for(self.hit) * self.groups.prefix_cacheable)
    evicted = property(lambda self: np.arange(self.config.num_blocks) == self.move.value)

    @property
    def busy(self) -> jax.Array:
        held = jnp.any(self.before.lengths > 0, axis=1)
        return jnp.any(held & (jnp.arange(len(held)) != self.slot))

    @property
    def adopted(self) -> jax.Array:
        looked = self.ledger_before[self.move.slot, Fact.FOCUS] == LOOKED_UP
        return jnp.where(looked, self.before.hits[self.move.slot], 0)

    def may(self, *operations: type) -> bool:
        """True if an explorer performs one of those."""
        return any(each in CODES for each in operations)

    def does(self, *operations: type) -> jax.Array:
        return self.move.is_a(*(CODES[each] for each in operations if each in CODES))

    def mine(self, values: jax.Array) -> jax.Array:
        chosen = (jnp.arange(values.shape[0]) == self.slot).reshape(-1, *[1] * (values.ndim - 1))
        return jnp.sum(jnp.where(chosen, values, 0), axis=0)

    def fact(self, name: str) -> Any:
        return self.mine(self.ledger[:, FACTS[name]]) if name in FACTS else 0

    def take(self, values: jax.Array, cells: jax.Array) -> jax.Array:
        return of_blocks(cells, values)

    def _named(self, cells: jax.Array) -> jax.Array:
        ids = np.arange(self.config.num_blocks)
        return (cells[..., None] == ids) & (ids > 0)

    def places(self, cells: jax.Array) -> jax.Array:
        return jnp.sum(self._named(cells), axis=tuple(range(cells.ndim)))

    def most(self, cells: jax.Array, values: Any) -> jax.Array:
        spread = jnp.where(self._named(cells), jnp.broadcast_to(values, cells.shape)[..., None], -FAR)
        return jnp.max(spread, axis=tuple(range(cells.ndim)))

    def rank(self, values: jax.Array) -> jax.Array:
        return jnp.sum(values[None, :] < values[:, None], axis=1)

    def among(self, values: jax.Array, others: jax.Array, chosen: jax.Array) -> jax.Array:
        return jnp.any((values[:, None] == others) & chosen, axis=1)

    def outgrown(self, tokens: Any, width: int, kept: bool = True) -> Any:
        if isinstance(tokens, int):
            return arrays.outgrown(self.config, tokens, width, kept)
        table = self.define.outgrown if kept else self.define.unread
        return jnp.asarray(table)[jnp.clip(tokens, 0, self.config.max_model_len)]

    def read(self, hit: jax.Array) -> jax.Array:
        return jnp.any(self.define.needed & self._at(hit)[:, None, None], axis=0)

    def registrable(self, tokens: jax.Array) -> jax.Array:
        return jnp.asarray(self.define.registrable)[:, jnp.clip(tokens, 0, self.config.max_model_len)]

    def _at(self, tokens: jax.Array) -> jax.Array:
        """bool[L + 1], true at so many tokens."""
        return np.arange(self.config.max_model_len + 1) == tokens

    def prefixes(self, ends: Any, chosen: jax.Array) -> jax.Array:
        del chosen
        strings, lengths = (self.ledger[:, fact, None, None] for fact in (Fact.STRING, Fact.LENGTH))
        return self._cut(strings, lengths, ends)

    def _cut(self, strings: jax.Array, lengths: jax.Array, ends: Any) -> jax.Array:
        """Strings' prefixes of so many tokens that have a key; -1 where there is none."""
        exists = (ends > 0) & (ends <= lengths) & (ends % self.config.hash_block_size == 0)
        return jnp.where(exists, strings >> jnp.maximum(lengths - ends, 0), -1)

    def owned(self, chosen: jax.Array) -> jax.Array:
        rows = self.after.rows
        return self.prefixes(self.take(self.after.tokens, rows), chosen) == self.take(self.after.key, rows)

    def continues(self, cells: jax.Array, ends: jax.Array, chosen: jax.Array) -> jax.Array:
        del chosen
        more = jnp.maximum(self.take(self.after.tokens, cells) - ends, 0)
        mine = self._cut(self.mine(self.ledger[:, Fact.STRING]), self.fact("length"), ends)
        return self.take(self.after.key, cells) >> more == mine

    @property
    def named(self) -> jax.Array:
        return (self.after.tokens > 0) & (self.after.tokens % self.config.hash_block_size == 0)

    def same(self) -> jax.Array:
        return self.before.same(self.after)

    def excused(self, direction: str) -> jax.Array:
        table = self.define.may_be_less if direction == "less" else self.define.may_be_more
        return jnp.any(self._at(self.fact("length")) & table)

    @property
    def defined(self) -> jax.Array:
        """The longest hit by its definition."""
        ends = np.arange(self.config.max_model_len + 1)
        names = self._cut(self.mine(self.ledger[:, Fact.STRING]), self.fact("length"), ends)
        groups = np.arange(len(self.groups.sizes))[:, None, None]
        there = (self.after.group == groups) & (self.after.key == names[:, None]) & self.after.cached
        satisfied = jnp.any(self.define.proofs & jnp.any(there, axis=-1), axis=(2, 3)) | ~self.define.proven
        possible = jnp.all(satisfied, axis=1) & self.define.aligned & (ends < self.fact("length"))
        return jnp.max(jnp.where(possible, ends, 0))

    @property
    def may_be_hit(self) -> jax.Array:
        return jnp.any(self._at(self.hit) & self.define.aligned & (self.hit < self.fact("length")))


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


def _totality(m: Moment) -> Iterator[Wrong]:
    """Every legal operation is performed, or refused for a reason that it may be refused for; who is granted blocks has
    some."""
    allocates, refused = m.move.is_a(Code.ALLOCATE), jnp.isin(m.status, jnp.array([int(each) for each in REFUSALS]))
    fine = m.granted | (allocates & refused) | (m.move.is_a(Code.RESET) & (m.status == int(Status.IN_USE)))
    yield ~fine | (allocates & m.granted & ~jnp.any(m.mine(m.after.lengths) > 0)), str


def _key_table(m: Moment) -> Iterator[Wrong]:
    """The table in which lookups search leads to exactly the blocks that have keys."""
    yield ~m.after.listed, str


def _hit_admission(m: Moment) -> Iterator[Wrong]:
    """The count of `hit admission`; beside states, no refusal of a hit is judged: one moment does not say which are of
    this step."""
    found, covered = m.mine(m.before.found) * (m.adopted > 0), m.blocks_for(m.adopted) * m.groups.prefix_cacheable
    for wrong, say in invariants.rows.admitted(m, found, covered, m.adopted > 0):
        yield m.waiting & wrong, say


OWN = {
    "totality": Declared(_totality, ()),
    "key table": Declared(_key_table, ()),
    "hit admission": Declared(_hit_admission, (oplog.AllocateOp,)),
}


def _judge(declared: Declared) -> Callable[[Moment], jax.Array]:
    """True if the invariant is broken."""

    def judge(m: Moment) -> jax.Array:
        broken = jnp.zeros((), bool)
        for wrong, _ in declared.find(m):
            broken = broken | jnp.any(wrong)
        return broken & m.does(*declared.after) if declared.after else broken

    return judge


ORDER = (
    *("totality", "conservation", "references", "ownership", "null block", "eviction order", "release", "index"),
    *("key life", "registration", "key table", "retirement", "room", "admission", "hit admission", "soundness"),
    *("maximality", "draft margin", "consistency"),
)
JUDGES = {name: _judge({**arrays.DECLARED, **OWN}[name]) for name in ORDER}
"""Every judge, by the name of its invariant, in the order of the bits that programs answer."""

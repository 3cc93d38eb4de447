"""Argument of the judges: one operation with the cache before and after it; and the register of judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact, Move, follow, prefixes
from hkv.dialects.vllm.explorer.picture import Picture
from hkv.dialects.vllm.explorer.space import Definitions, Space
from hkv.dialects.vllm.rules.operations import Code
from hkv.state.status import Status


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

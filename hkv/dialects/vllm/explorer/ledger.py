"""State of every request as the operations alone tell it, as an array: `traffic.ledger` for many lanes at once."""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules.operations import Code
from hkv.state.status import Status


class Fact(enum.IntEnum):
    """Columns of a ledger, int32[requests, 8], a row a request slot. Lengths are in tokens."""

    STRING = 0
    """Tokens as a number (`hkv.dialects.vllm.explorer.space.code_of`); 0: the slot is empty."""
    LENGTH = 1
    RUNNING = 2
    COMPUTED = 3
    MAIN = 4
    """Tokens that it was granted room for since it last waited."""
    PROCESSED = 5
    """The most computed and adopted tokens that an allocation saw."""
    FOCUS = 6
    """`LOOKED_UP`: its lookup was the last operation; `GRANTED`: what it was granted is about to be computed."""
    OWED = 7
    """1: what it computed is not registered yet."""


LOOKED_UP, GRANTED = 1, 2
"""Values of `Fact.FOCUS`: only that request's next operation can follow."""


class Move(NamedTuple):
    """One operation: its code, the request slot, and two numbers that mean what its code wants.

    REQUEST: the string and its length. ALLOCATE: new tokens, and whether registration is delayed. APPEND: the token.
    EVICT: the block.
    """

    code: jax.Array
    slot: jax.Array
    value: jax.Array
    extra: jax.Array

    def is_a(self, *codes: Code) -> jax.Array:
        """True if the operation is one of those."""
        found = self.code == int(codes[0])
        for code in codes[1:]:
            found = found | (self.code == int(code))
        return found


def follow(ledger: jax.Array, move: Move, hit: jax.Array, status: jax.Array) -> jax.Array:
    """The ledger after an operation.

    Args:
      ledger: before it.
      move: the operation.
      hit: tokens that an ALLOCATE adopts.
      status: status of the answer.
    """
    mine = ledger[move.slot]
    granted = status == int(Status.OK)
    total = mine[Fact.COMPUTED] + hit
    fact = {name: mine[name] for name in Fact}

    def change(code: Code, **values: jax.Array | int) -> None:
        for name, value in values.items():
            fact[Fact[name]] = jnp.where(move.is_a(code), value, fact[Fact[name]])

    nothing = dict.fromkeys(("RUNNING", "COMPUTED", "MAIN", "PROCESSED", "FOCUS", "OWED"), 0)
    running = mine[Fact.RUNNING]
    processed = jnp.maximum(mine[Fact.PROCESSED], total)
    change(Code.REQUEST, STRING=move.value, LENGTH=move.extra, **nothing)
    change(Code.LOOKUP, FOCUS=LOOKED_UP)
    change(
        Code.ALLOCATE,
        RUNNING=running | granted,
        MAIN=jnp.where(granted, jnp.maximum(mine[Fact.MAIN], total + move.value), mine[Fact.MAIN]),
        PROCESSED=jnp.where(granted | (running != 0), processed, 0),
        FOCUS=jnp.where(granted, GRANTED, 0),
        OWED=jnp.where(granted, move.extra, mine[Fact.OWED]),
    )
    change(Code.ADVANCE, COMPUTED=mine[Fact.MAIN], FOCUS=0)
    change(Code.APPEND, STRING=2 * mine[Fact.STRING] + move.value, LENGTH=mine[Fact.LENGTH] + 1)
    change(Code.COMMIT, OWED=0)
    change(Code.FREE, **nothing)
    change(Code.DROP, STRING=0, LENGTH=0, **nothing)
    new = jnp.stack([fact[name] for name in Fact]).astype(jnp.int32)
    about_one = ~move.is_a(Code.EVICT, Code.RESET, Code.STEP)
    slots = jnp.arange(ledger.shape[0])[:, None]
    return jnp.where(about_one & (slots == move.slot), new, ledger)


def prefixes(ledger: jax.Array, unit: int, longest: int) -> jax.Array:
    """The strings' prefixes that have a key, int32[requests, longest + 1]; -1 where there is none.

    Args:
      ledger: the ledger.
      unit: tokens between two keys.
      longest: most tokens of a request.
    """
    ends = jnp.arange(longest + 1)
    cut = ledger[:, Fact.LENGTH, None] - ends
    exists = (cut >= 0) & (ends > 0) & (ends % unit == 0)
    return jnp.where(exists, ledger[:, Fact.STRING, None] >> jnp.maximum(cut, 0), -1)

"""Operations of the explorer: when each may come, and what it is in the log and in the compiled cache."""

from __future__ import annotations

import enum
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.space import Space, code_of, tokens_of
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.rules.operations import Argument, Code
from hkv.machine.operations import WIDTH, Operations
from hkv.state.status import Status


def all_moves(space: Space) -> np.ndarray:
    """Every operation that may ever come, int32[n, 4], columns as `ExplorerMove`."""
    longest, rows = space.config.max_model_len, []
    for length in range(1, space.prompt + 1):
        for tokens in itertools.product((0, 1), repeat=length):
            rows += [(Code.REQUEST, slot, code_of(tokens), length) for slot in range(space.requests)]
    delays = (0,) if "delay" in space.without else (0, 1)
    for slot in range(space.requests):
        rows.append((Code.LOOKUP, slot, 0, 0))
        rows += [(Code.ALLOCATE, slot, new, late) for new in range(1, longest + 1) for late in delays]
        rows += [(Code.APPEND, slot, token, 0) for token in (0, 1)]
        rows += [(code, slot, 0, 0) for code in (Code.ADVANCE, Code.FREE)]
        if "drop" not in space.without:
            rows.append((Code.DROP, slot, 0, 0))
        if "delay" not in space.without:
            rows.append((Code.COMMIT, slot, 0, 0))
    if "evict" not in space.without:
        rows += [(Code.EVICT, 0, block, 0) for block in range(1, space.config.num_blocks)]
    if "reset" not in space.without:
        rows.append((Code.RESET, 0, 0, 0))
    if any(spec.snapshot for spec in space.config.topology.specs):
        rows.append((Code.STEP, 0, 0, 0))
    return np.array(rows, np.int32)


def enabled(
    space: Space, moves: np.ndarray, ledger: jax.Array, hits: jax.Array, cached: jax.Array, young: jax.Array
) -> jax.Array:
    """Mask bool[n] of the `moves` that may come next.

    After a lookup its request is admitted, and after a grant it is computed, before anything else happens. Of several
    empty slots only the first is filled: they are the same up to renaming.

    Args:
      space: the space.
      moves: of `all_moves`.
      ledger: state of every request, as the operations tell it.
      hits: int32[requests], tokens that the lookup just before found.
      cached: bool[blocks], blocks that have keys.
      young: True if a state was registered in this step.
    """
    code, slot, value, extra = moves.T
    mine = {fact: _at(ledger[:, fact], slot) for fact in Fact}
    empty = ledger[:, Fact.STRING] == 0
    first = empty & (jnp.cumsum(empty) == 1)
    focus = mine[Fact.FOCUS]
    free = ~jnp.any(ledger[:, Fact.FOCUS] != 0)
    waiting = (mine[Fact.STRING] != 0) & (mine[Fact.RUNNING] == 0)
    running = mine[Fact.RUNNING] != 0
    start = mine[Fact.COMPUTED] + jnp.where(focus == LOOKED_UP, _at(hits, slot), 0)
    left = mine[Fact.LENGTH] - start
    fits = (value == left) if "parts" in space.without else (value <= left)
    anew = free & waiting & ("cold" not in space.without)
    grows = (focus == LOOKED_UP) | anew | (free & running)
    full = mine[Fact.LENGTH] >= space.config.max_model_len
    may = {
        Code.REQUEST: free & _at(first, slot),
        Code.LOOKUP: free & waiting,
        Code.ALLOCATE: grows & fits & (left > 0),
        Code.ADVANCE: focus == GRANTED,
        Code.APPEND: free & running & (mine[Fact.COMPUTED] == mine[Fact.LENGTH]) & ~full,
        Code.COMMIT: free & running & (mine[Fact.OWED] != 0),
        Code.FREE: free & running,
        Code.DROP: free & waiting,
        Code.EVICT: free & _at(cached, value % space.config.num_blocks),
        Code.RESET: free & jnp.any(cached),
        Code.STEP: free & young,
    }
    del extra
    allowed = jnp.zeros(len(moves), bool)
    for each, condition in may.items():
        allowed = allowed | (condition & (code == int(each)))
    return allowed


def _at(values: jax.Array, places: np.ndarray) -> jax.Array:
    """`values[places]` by comparing: small, and vectorised over lanes where a gather is not."""
    chosen = np.arange(values.shape[0])[:, None] == places
    if values.dtype == jnp.bool_:
        return jnp.any(values[:, None] & chosen, axis=0)
    return jnp.sum(jnp.where(chosen, values[:, None], 0), axis=0)


def operation(space: Space, move: ExplorerMove, ledger: jax.Array) -> Operations:
    """One operation of the compiled cache."""
    unit, longest = space.config.hash_block_size, space.config.max_model_len
    mine = ledger[move.slot]
    arriving, appending = move.is_a(Code.REQUEST), move.is_a(Code.APPEND)
    string = jnp.where(arriving, move.value, 2 * mine[Fact.STRING] + move.value)
    length = jnp.where(arriving, move.extra, mine[Fact.LENGTH] + 1)
    before = jnp.where(arriving, 0, mine[Fact.LENGTH])
    ends = before - before % unit + unit * jnp.arange(1, max(1, longest // unit) + 1)
    keys = jnp.where(arriving | appending, length // unit - before // unit, move.is_a(Code.EVICT))
    payload = jnp.where(move.is_a(Code.EVICT), move.value, string >> jnp.clip(length - ends, 0, 30))
    tokens = jnp.where(arriving, length, jnp.where(appending, 1, 0))
    tokens = jnp.where(move.is_a(Code.ADVANCE), mine[Fact.MAIN] - mine[Fact.COMPUTED], tokens)
    tokens = jnp.where(move.is_a(Code.COMMIT), mine[Fact.COMPUTED], tokens)
    allocating = move.is_a(Code.ALLOCATE)
    values: dict[int, Any] = {
        Argument.CODE: move.code,
        Argument.SLOT: move.slot,
        Argument.TOKENS: tokens,
        Argument.KEYS: keys,
        Argument.NEW: jnp.where(allocating, move.value, 0),
        Argument.HIT: jnp.where(mine[Fact.FOCUS] == LOOKED_UP, -1, 0),
        Argument.DELAY: jnp.where(allocating, move.extra, 0),
        Argument.SHARED_PREFIX: -1,
    }
    row = jnp.stack([jnp.asarray(values.get(column, 0), jnp.int32) for column in range(WIDTH)])
    return Operations(table=row[None], payload=payload.astype(jnp.int32))


def to_log(move: np.ndarray, ledger: np.ndarray, hit: int, names: list[str]) -> oplog.Operation:
    """One operation of the log format.

    Args:
      move: one row of `all_moves`.
      ledger: state of every request before it.
      hit: tokens that the lookup just before found; only for an ALLOCATE.
      names: of the requests in the slots, the new one's included.
    """
    code, slot, value, extra = map(int, move)
    mine, id = ledger[slot], names[slot]
    match Code(code):
        case Code.REQUEST:
            return oplog.RequestOp(id=id, tokens=tokens_of(value))
        case Code.LOOKUP:
            return oplog.LookupOp(id=id)
        case Code.ALLOCATE:
            plain = {"lookahead": 0, "external": 0, "must_fit": False, "reserved": 0, "in_flight": 0}
            return oplog.AllocateOp(id=id, new=value, hit=hit, delay=bool(extra), **plain)
        case Code.ADVANCE:
            return oplog.AdvanceOp(id=id, tokens=int(mine[Fact.MAIN] - mine[Fact.COMPUTED]))
        case Code.APPEND:
            return oplog.AppendOp(id=id, tokens=[value])
        case Code.COMMIT:
            return oplog.CommitOp(id=id, tokens=int(mine[Fact.COMPUTED]))
        case Code.FREE:
            return oplog.FreeOp(id=id)
        case Code.DROP:
            return oplog.DropOp(id=id)
        case Code.EVICT:
            return oplog.EvictOp(blocks=[value])
        case Code.RESET:
            return oplog.ResetOp()
        case _:
            return oplog.StepOp()


# State of every request as the operations alone tell it, as an array: `invariants.moment.Ledger` for many lanes.


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


class ExplorerMove(NamedTuple):
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


def follow(ledger: jax.Array, move: ExplorerMove, hit: jax.Array, status: jax.Array) -> jax.Array:
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
    """The strings' prefixes that have a key, int32[requests, longest + 1]; -1 where a prefix has no key.

    Args:
      ledger: the ledger.
      unit: tokens between two keys.
      longest: most tokens of a request.
    """
    ends = jnp.arange(longest + 1)
    cut = ledger[:, Fact.LENGTH, None] - ends
    exists = (cut >= 0) & (ends > 0) & (ends % unit == 0)
    return jnp.where(exists, ledger[:, Fact.STRING, None] >> jnp.maximum(cut, 0), -1)

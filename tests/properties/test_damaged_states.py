"""Every kind of damage to a cache's state is reported by an invariant that has a name, and never by an exception."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable

import pytest

from hkv.contract.invariant import InvariantError
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Answer, CacheState, Operation
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.dialects.vllm.traffic.live import drive

SEEDS, WANTED = range(400), 12
"""Examples to look at, and moments of each kind of damage that are wanted."""

Damage = Callable[[CacheState, random.Random], bool]
"""Changes a state; False where there is nothing to change."""


def _pick(draw: random.Random, items) -> object:
    return draw.choice(sorted(items))


def _row(state: CacheState, draw: random.Random, least: int = 1) -> list[int] | None:
    """A row with as many blocks."""
    rows = [row for groups in state.rows.values() for row in groups if sum(map(bool, row)) >= least]
    return draw.choice(rows) if rows else None


def _filled(row: list[int], draw: random.Random) -> int:
    return draw.choice([column for column, block in enumerate(row) if block])


def in_two_rows(state, draw):
    one, two = _row(state, draw), _row(state, draw)
    if one is None or two is None or one is two:
        return False
    block = one[_filled(one, draw)]
    if block in two:
        return False
    two[_filled(two, draw)] = block
    return True


def leaked(state, draw):
    if state.free:
        state.free.pop(draw.randrange(len(state.free)))
        return True
    return False


def freed_while_referenced(state, draw):
    if state.refs:
        state.free.append(int(_pick(draw, state.refs)))
    return bool(state.refs)


def reference_of_a_free_block(state, draw):
    if state.free:
        state.refs[str(draw.choice(state.free))] = 1
    return bool(state.free)


def queued_twice(state, draw):
    if state.free:
        state.free.append(draw.choice(state.free))
    return bool(state.free)


def queue_goes_round(state, draw):
    if len(state.free) < 2:
        return False
    state.free[-1] = state.free[0]
    return True


def negative_reference(state, draw):
    if state.refs:
        state.refs[str(_pick(draw, state.refs))] = -1
    return bool(state.refs)


def one_reference_too_few(state, draw):
    shared = [block for block, count in state.refs.items() if count > 1]
    if shared:
        state.refs[_pick(draw, shared)] -= 1
    return bool(shared)


def lost_request(state, draw):
    if state.rows:
        del state.rows[_pick(draw, state.rows)]
    return bool(state.rows)


def lost_row(state, draw):
    if state.rows:
        state.rows[_pick(draw, state.rows)].pop()
    return bool(state.rows)


def row_of_nobody(state, draw):
    state.rows["nobody"] = [[] for _ in next(iter(state.rows.values()), [[]])]
    return True


def row_of_a_group_too_many(state, draw):
    if state.rows:
        state.rows[_pick(draw, state.rows)].append([1])
    return bool(state.rows)


def lost_column(state, draw):
    row = _row(state, draw)
    if row is None:
        return False
    row.pop(_filled(row, draw))
    return True


def lost_block(state, draw):
    row = _row(state, draw)
    if row is None:
        return False
    row[_filled(row, draw)] = 0
    return True


def swapped_columns(state, draw):
    row = _row(state, draw, least=2)
    if row is None:
        return False
    one, two = draw.sample([column for column, block in enumerate(row) if block], 2)
    row[one], row[two] = row[two], row[one]
    cached = state.cached.get(str(row[one])), state.cached.get(str(row[two]))
    return any(cached)


def swapped_keys(state, draw):
    if len(state.cached) < 2:
        return False
    one, two = draw.sample(sorted(state.cached), 2)
    state.cached[one], state.cached[two] = state.cached[two], state.cached[one]
    return state.cached[one] != state.cached[two]


def key_of_another_group(state, draw):
    if not state.cached:
        return False
    block = _pick(draw, state.cached)
    group, tokens, key = state.cached[block]
    state.cached[block] = (group + 1, tokens, key)
    return True


def key_of_more_tokens(state, draw):
    if not state.cached:
        return False
    block = _pick(draw, state.cached)
    group, tokens, key = state.cached[block]
    state.cached[block] = (group, tokens + 1, key)
    return True


def key_of_nothing(state, draw):
    """Of a block in the queue: what a request's own new block is called, only the engine knows."""
    queued = state.cached.keys() & set(map(str, state.free))
    if not queued:
        return False
    block = _pick(draw, queued)
    group, tokens, _ = state.cached[block]
    state.cached[block] = (group, tokens, "0123456789abcdef")
    return True


def null_block_is_queued(state, draw):
    state.free.append(0)
    return True


def null_block_is_known(state, draw):
    if state.cached:
        state.cached["0"] = state.cached[_pick(draw, state.cached)]
    return bool(state.cached)


def no_such_block_in_a_row(state, draw):
    row = _row(state, draw)
    if row is not None:
        row[_filled(row, draw)] = 10_000
    return row is not None


def no_such_block_in_the_queue(state, draw):
    state.free.insert(0, -3)
    return True


def no_such_block_is_known(state, draw):
    if state.cached:
        state.cached["10000"] = state.cached[_pick(draw, state.cached)]
    return bool(state.cached)


DAMAGES: tuple[Damage, ...] = (
    in_two_rows,
    leaked,
    freed_while_referenced,
    reference_of_a_free_block,
    queued_twice,
    queue_goes_round,
    negative_reference,
    one_reference_too_few,
    lost_request,
    lost_row,
    row_of_nobody,
    row_of_a_group_too_many,
    lost_column,
    lost_block,
    swapped_columns,
    swapped_keys,
    key_of_another_group,
    key_of_more_tokens,
    key_of_nothing,
    null_block_is_queued,
    null_block_is_known,
    no_such_block_in_a_row,
    no_such_block_in_the_queue,
    no_such_block_is_known,
)


class Damaged:
    """An engine whose state is damaged once it has done what `after` says."""

    def __init__(self, header: oplog.Header, damage: Damage, draw: random.Random) -> None:
        self._engine = NumpyEngine(header)
        self._damage, self._draw = damage, draw
        self.armed = False
        self._changed: CacheState | None = None

    @property
    def done(self) -> bool:
        """True if anything was damaged."""
        return self._changed is not None

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def state(self) -> CacheState:
        state = self._engine.state()
        if self.armed and self._changed is None:
            changed = copy.deepcopy(state)
            self._changed = changed if self._damage(changed, self._draw) else None
        return state if self._changed is None else copy.deepcopy(self._changed)


class StopError(Exception):
    """The damage was noticed, or there was nothing to damage."""


def noticed(damage: Damage, number: int, after: type, alone: str | None = None) -> str | None:
    """The invariant that reports it; "" when none does, None when there was nothing to damage.

    The state is damaged after the third operation of a sort or a later one; `alone` names one invariant to ask alone.
    """
    choices = RandomChoices(number)
    header = draw_header(choices, FEATURES[number % len(FEATURES)], version=2)
    engine = Damaged(header, damage, random.Random(number))
    watch = Watch(engine, header, None if alone is None else [INVARIANTS[alone]])
    found: list[str | None] = [None]
    seen = 0

    def perform(operation: Operation) -> Answer:
        nonlocal seen
        seen += isinstance(operation, after)
        engine.armed = isinstance(operation, after) and seen >= 3
        try:
            answer = watch.perform(operation)
        except InvariantError as error:
            assert engine.done, "broken before it was damaged"
            found[0] = error.name
            raise StopError from None
        granted = not isinstance(answer, Allocation) or answer.blocks is not None
        if engine.done:
            found[0] = "" if granted else None
            raise StopError
        return answer

    with contextlib.suppress(StopError):
        drive(header, choices, perform, steps=8)
    return found[0]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_reported_by_a_named_invariant(damage: Damage) -> None:
    for after in (oplog.AllocateOp, oplog.StateOp):
        found: list[str] = []
        for number in SEEDS:
            name = noticed(damage, number, after)
            found += [] if name is None else [name]
            if len(found) == WANTED:
                break
        assert found
        assert "" not in found, f"not noticed after {after.__name__}"


INSIDE = (in_two_rows, lost_request, lost_row, lost_column, lost_block, row_of_nobody, swapped_keys, negative_reference)
"""Damages of which every invariant has to make sense alone."""


@pytest.mark.parametrize("name", INVARIANTS)
def test_no_invariant_fails_by_itself(name: str) -> None:
    for number, damage in enumerate(INSIDE * 2):
        noticed(damage, number, oplog.AllocateOp, name)

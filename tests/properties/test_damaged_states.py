"""Every kind of damage to a cache's state is reported by an invariant that has a name, and never by an exception."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

from hkv.contract.invariant import InvariantError
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Answer, CacheState, Operation
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.dialects.vllm.traffic.live import drive

SEEDS, WANTED = range(120), 6
"""Examples to look at, and moments of each kind of damage that are wanted."""

Damage = Callable[[CacheState, random.Random], bool]
"""Changes a state; False where there is nothing to change."""

DAMAGES: list[Damage] = []


def damage(change: Callable[[Any, random.Random], object]) -> Damage:
    """A damage to a state, which may be too empty to draw from; what is changed answers False if it does not matter."""

    @functools.wraps(change)
    def damaged(state: CacheState, draw: random.Random) -> bool:
        try:
            return change(state, draw) is not False
        except (IndexError, StopIteration):
            return False

    DAMAGES.append(damaged)
    return damaged


def _pick(draw: random.Random, items) -> Any:
    return draw.choice(sorted(items))


def _row(state: CacheState, draw: random.Random, least: int = 1) -> list[int]:
    """A row with as many blocks."""
    return draw.choice([row for groups in state.rows.values() for row in groups if sum(map(bool, row)) >= least])


def _filled(row: list[int], draw: random.Random) -> int:
    return draw.choice([column for column, block in enumerate(row) if block])


@damage
def in_two_rows(state, draw):
    one, two = _row(state, draw), _row(state, draw)
    if one is two or (block := one[_filled(one, draw)]) in two:
        return False
    two[_filled(two, draw)] = block


@damage
def leaked(state, draw):
    state.free.remove(draw.choice(state.free))


@damage
def freed_while_referenced(state, draw):
    state.free.append(int(_pick(draw, state.refs)))


@damage
def reference_of_a_free_block(state, draw):
    state.refs[str(draw.choice(state.free))] = 1


@damage
def queued_twice(state, draw):
    state.free.append(draw.choice(state.free))


@damage
def queue_goes_round(state, draw):
    if len(state.free) < 2:
        return False
    state.free[-1] = state.free[0]


@damage
def negative_reference(state, draw):
    state.refs[_pick(draw, state.refs)] = -1


@damage
def one_reference_too_few(state, draw):
    state.refs[_pick(draw, [block for block, count in state.refs.items() if count > 1])] -= 1


@damage
def lost_request(state, draw):
    del state.rows[_pick(draw, state.rows)]


@damage
def lost_row(state, draw):
    state.rows[_pick(draw, state.rows)].pop()


@damage
def row_of_nobody(state, draw):
    state.rows["nobody"] = [[] for _ in next(iter(state.rows.values()), [[]])]


@damage
def row_of_a_group_too_many(state, draw):
    state.rows[_pick(draw, state.rows)].append([1])


@damage
def lost_column(state, draw):
    row = _row(state, draw)
    row.pop(_filled(row, draw))


@damage
def lost_block(state, draw):
    row = _row(state, draw)
    row[_filled(row, draw)] = 0


@damage
def swapped_columns(state, draw):
    row = _row(state, draw, least=2)
    one, two = draw.sample([column for column, block in enumerate(row) if block], 2)
    row[one], row[two] = row[two], row[one]
    return str(row[one]) in state.cached or str(row[two]) in state.cached


@damage
def swapped_keys(state, draw):
    if len(state.cached) < 2:
        return False
    one, two = draw.sample(sorted(state.cached), 2)
    state.cached[one], state.cached[two] = state.cached[two], state.cached[one]
    return state.cached[one] != state.cached[two]


def _rename(state, block: str, group: int = 0, tokens: int = 0, key: str | None = None) -> None:
    """A cached block's entry of so many groups and tokens more, or of another key."""
    old_group, old_tokens, old_key = state.cached[block]
    state.cached[block] = (old_group + group, old_tokens + tokens, old_key if key is None else key)


@damage
def key_of_another_group(state, draw):
    _rename(state, _pick(draw, state.cached), group=1)


@damage
def key_of_more_tokens(state, draw):
    _rename(state, _pick(draw, state.cached), tokens=1)


@damage
def key_of_nothing(state, draw):
    """Of a block in the queue: what a request's own new block is called, only the engine knows."""
    _rename(state, _pick(draw, state.cached.keys() & set(map(str, state.free))), key="0123456789abcdef")


@damage
def null_block_is_queued(state, draw):
    state.free.append(0)


@damage
def null_block_is_known(state, draw):
    state.cached["0"] = state.cached[_pick(draw, state.cached)]


@damage
def no_such_block_in_a_row(state, draw):
    row = _row(state, draw)
    row[_filled(row, draw)] = 10_000


@damage
def no_such_block_in_the_queue(state, draw):
    state.free.insert(0, -3)


@damage
def no_such_block_is_known(state, draw):
    state.cached["10000"] = state.cached[_pick(draw, state.cached)]


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

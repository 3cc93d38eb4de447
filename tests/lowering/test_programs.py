"""Compiled rules in the place of plain ones: objects follow the arrays, and grow; what a program knows is checked."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from hkv.lowering.programs import Mirror, Program
from hkv.machine.kept_programs import FOLDER, SUFFIX
from reference.language import Layout
from tests.lowering.ledger import Ledger, pay

LAYOUT = Layout(Ledger)
SIZES = {"accounts": 3, "accounts.last": 2, "paid": 8}


def ledger(fee: int = 1) -> Ledger:
    made = LAYOUT.make(SIZES)
    made.rates.fee = fee
    return made


def test_objects_follow_what_a_program_does() -> None:
    """Also after others wrote to what they said they would, and to scalars."""
    program = Program(LAYOUT, pay)
    mirrored, plain = ledger(), ledger()
    mirror = Mirror(LAYOUT, program, mirrored, ("paid",))
    for number, amount in ((1, 10), (3, 20), (1, 30), (2, -5)):
        mirror.perform(number, amount)
        pay(plain, number, amount)
        for each in (mirrored, plain):
            each.rates.fee += 1
            each.paid[7] = each.accounts[number]
        assert LAYOUT.numbers_of(mirrored) == LAYOUT.numbers_of(plain)
    assert program.compilations() == 1


def test_objects_that_grew_are_compiled_for_anew() -> None:
    program = Program(LAYOUT, pay)
    mirrored, plain = ledger(), ledger()
    mirror = Mirror(LAYOUT, program, mirrored, ())
    for grown in range(3):
        mirror.perform(grown + 1, 10)
        pay(plain, grown + 1, 10)
        for each in (mirrored, plain):
            LAYOUT.grow(each, "accounts", grown)
            LAYOUT.lengthen(each, "accounts", grown)
        assert LAYOUT.numbers_of(mirrored) == LAYOUT.numbers_of(plain)
    assert program.compilations() == 2
    assert LAYOUT.sizes_of(mirrored) == {"accounts": 6, "accounts.last": 5, "paid": 8}


def test_what_a_program_knows_is_not_in_its_states_and_holds() -> None:
    program = Program(LAYOUT, pay, {"rates.fee": 2})
    state = program.state_of(ledger(fee=2))
    assert "rates.fee" not in state
    assert program(state, 1, 10)["accounts.sum"].tolist() == [0, 8, 0, 0]
    with pytest.raises(ValueError, match=r"rates\.fee is 1: expected 2"):
        program.state_of(ledger(fee=1))


def test_lanes_are_caches_of_their_own() -> None:
    program = Program(LAYOUT, pay, lanes=True)
    states = [program.state_of(ledger(fee)) for fee in (1, 5)]
    after = program(jax.tree.map(lambda *x: np.stack(x), *states), np.array([1, 2]), np.array([10, 20]))
    assert after["accounts.sum"].tolist() == [[0, 9, 0, 0], [0, 0, 15, 0]]


def test_programs_of_other_values_and_of_lanes_are_kept_apart(tmp_path, tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for fee in (1, 2, 2):
        program = Program(LAYOUT, pay, {"rates.fee": fee})
        program(program.state_of(ledger(fee)), 1, 10)
    assert sum(name.endswith(SUFFIX) for name in os.listdir(tmp_path)) == 2
    assert all(name.startswith("tests.lowering.ledger.pay-") for name in os.listdir(tmp_path))

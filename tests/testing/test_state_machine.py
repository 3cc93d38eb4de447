"""The rule-based state machine: what is right passes, what is wrong is found."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Hit
from hkv.testing.state_machine import engine_machine

FEW = settings(max_examples=5, stateful_step_count=15)
ENOUGH = settings(max_examples=100, stateful_step_count=25, phases=[Phase.generate])


class Optimist(NumpyEngine):
    """Says that one token more is hit."""

    def lookup(self, id: str) -> Hit:
        found = super().lookup(id)
        return Hit(found.hit + 1, found.blocks, found.shared_prefix)


def test_the_reference_keeps_every_invariant() -> None:
    run_state_machine_as_test(engine_machine(NumpyEngine), settings=FEW)


def test_a_wrong_engine_is_found() -> None:
    with pytest.raises(InvariantError):
        run_state_machine_as_test(engine_machine(Optimist, ("core",)), settings=ENOUGH)

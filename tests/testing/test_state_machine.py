"""The rule-based state machine under each dialect's rules: what is right passes, what is wrong is found."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hkv.contract.invariant import InvariantError
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Hit
from hkv.oracle.record import ALL, Only
from hkv.testing.state_machine import engine_machine

FEW = settings(max_examples=5, stateful_step_count=15)
ENOUGH = settings(max_examples=100, stateful_step_count=25, phases=[Phase.generate])


class Optimist(NumpyEngine):
    """Says that one token more is hit."""

    def lookup(self, id: str) -> Hit:
        found = super().lookup(id)
        return Hit(found.hit + 1, found.blocks, found.shared_prefix)


class Leaker(RtpNumpyEngine):
    """Forgets that a request which ends gives its blocks back."""

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        if isinstance(operation, structs.FreeOp):
            request = self.request(operation.id)
            for row in request.rows[: request.batch]:
                for ids in row.groups[: self.cache.config.groups]:
                    ids.length = 0
            return None
        return super().perform(operation)


RIGHT = [(NumpyEngine, ALL), *((RtpNumpyEngine, Only(dialect=name)) for name in NAMES)]
WRONG = [(Optimist, ("core",), ALL), *((Leaker, (), Only(dialect=name)) for name in NAMES)]


@pytest.mark.parametrize(("engine", "only"), RIGHT)
def test_the_reference_keeps_every_invariant(engine: type, only: Only) -> None:
    run_state_machine_as_test(engine_machine(engine, only=only), settings=FEW)


@pytest.mark.parametrize(("engine", "features", "only"), WRONG)
def test_a_wrong_engine_is_found(engine: type, features: tuple[str, ...], only: Only) -> None:
    with pytest.raises(InvariantError):
        run_state_machine_as_test(engine_machine(engine, features, only=only), settings=ENOUGH)

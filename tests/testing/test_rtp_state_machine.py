"""The state machine under RTP-LLM's rules: what is right passes, what is wrong is found."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hkv.contract.invariant import InvariantError
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.oracle.record import Only
from hkv.testing.state_machine import engine_machine

FEW = settings(max_examples=4, stateful_step_count=15)
ENOUGH = settings(max_examples=60, stateful_step_count=25, phases=[Phase.generate])


class Leaker(RtpNumpyEngine):
    """Forgets that a request which ends gives its blocks back."""

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        if isinstance(operation, structs.FreeOp):
            rows = self.manager.requests[operation.id].resource.rows
            for row in rows:
                for blocks in row.groups:
                    blocks.assign(())
            return None
        return super().perform(operation)


@pytest.mark.parametrize("dialect", NAMES)
def test_the_reference_keeps_every_invariant(dialect: str) -> None:
    run_state_machine_as_test(engine_machine(RtpNumpyEngine, only=Only(dialect=dialect)), settings=FEW)


@pytest.mark.parametrize("dialect", NAMES)
def test_a_wrong_engine_is_found(dialect: str) -> None:
    with pytest.raises(InvariantError):
        run_state_machine_as_test(engine_machine(Leaker, only=Only(dialect=dialect)), settings=ENOUGH)

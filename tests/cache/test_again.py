"""Repeated commits: tokens are committed again that were registered when their blocks were allocated."""

from __future__ import annotations

from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import (
    AdvanceOp,
    AllocateOp,
    Answer,
    CommitOp,
    EventsOp,
    FreeOp,
    LookupOp,
    Operation,
    RequestOp,
    StateOp,
    StepOp,
)
from hkv.spec import FullAttention, Mamba
from tests.cache.build import config

NO = {"lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}


def test_a_state_left_behind_inside_a_block_is_registered_once() -> None:
    """A chunk leaves a state inside a block; the commit after it must find the state registered under its key.

    Random traffic commits an allocation again in one of eleven chunks, and leaves a state inside a block behind in one
    of six cases: the two meet in one seed of two hundred.
    """
    specs = (
        FullAttention(block_size=8),
        Mamba(block_size=16, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4),
    )
    header = to_header(config(*specs, scheduler_block_size=16, partial_hits=True), "speculative_state")
    compiled, reference = JaxEngine(header), NumpyEngine(header)

    def perform(operation: Operation) -> Answer:
        want = apply(reference, operation)
        assert compare(want, apply(compiled, operation), header.oplog) is None, operation
        return want

    tokens = list(range(46))
    for name in ("a", "b"):
        perform(StepOp())
        perform(RequestOp(id=name, tokens=tokens))
        perform(AllocateOp(id=name, new=46, hit=0, **NO))
        perform(AdvanceOp(id=name, tokens=46))
        first = perform(EventsOp())
        assert 1 in [event.num_blocks for event in first if event.group == 1]
        perform(CommitOp(id=name, tokens=46))
        assert perform(EventsOp()) == []
        perform(StateOp())
    perform(FreeOp(id="b"))
    assert perform(LookupOp(id="b")).hit == 44

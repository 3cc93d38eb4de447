"""States that a connector is offered, in both engines."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.renaming import Renaming
from hkv.errors import ConfigError, OperationError
from hkv.oracle.engines import engine_factory
from tests.oracle.test_live_logs import allocate, perform
from tests.oracle.test_live_logs import header as live_header

BOTH = pytest.mark.parametrize("name", ["numpy", "jax"])
STATES = {"kind": "mamba", "block_size": 4, "num_speculative_blocks": 0}
FULL = {"kind": "full_attention", "block_size": 4}
TOKENS = list(range(12))
LOSSES: dict[str, oplog.Operation] = {
    "free": oplog.FreeOp(id="a"),
    "pop": oplog.PopOp(id="a"),
    "retire": oplog.RetireOp(id="a", tokens=9),
    "evict": oplog.EvictOp(blocks=[1]),
}


def header(**changes: Any) -> oplog.Header:
    fields: dict[str, Any] = {"groups": [STATES, FULL], "offloads": True, "scheduler_block_size": 4}
    return live_header(**fields | {"partial_hits": True, "num_blocks": 20} | changes)


@BOTH
@pytest.mark.parametrize(("computed", "in_flight"), [(6, 0), (6, 1), (5, 0)])
def test_the_end_of_a_prompt_is_offered_where_its_request_ends(name: str, computed: int, in_flight: int) -> None:
    engine = engine_factory(name)(header())
    perform(engine, oplog.RequestOp(id="a", tokens=TOKENS[:7]), allocate("a", 6))
    perform(engine, oplog.ComputedOp(id="a", tokens=computed))
    column = 6 // 4
    block = engine.state().rows["a"][0][column]
    assert engine.finalize("a", in_flight) == ([(0, block, 6)] if (computed, in_flight) == (6, 0) else [])
    assert engine.finalize("a", 0) == []


@BOTH
@pytest.mark.parametrize("loss", ["free", "pop"])
def test_nothing_of_a_request_that_ended_is_offered(name: str, loss: str) -> None:
    engine = engine_factory(name)(header(bugs=["offer-outlives-state"]))
    perform(engine, oplog.RequestOp(id="a", tokens=TOKENS), allocate("a", 4), LOSSES[loss])
    assert engine.offloads() == {}


@BOTH
@pytest.mark.parametrize("bugs", ["", "offer-outlives-state"])
@pytest.mark.parametrize("loss", ["retire", "evict"])
def test_a_state_that_is_gone_is_not_offered(name: str, bugs: str, loss: str) -> None:
    engine = engine_factory(name)(header(bugs=bugs.split()))
    perform(engine, oplog.RequestOp(id="a", tokens=TOKENS), allocate("a", 4))
    perform(engine, oplog.ComputedOp(id="a", tokens=4), allocate("a", 5), LOSSES[loss])
    assert engine.offloads() == ({"a": [(0, 1, 4)]} if bugs else {})


@BOTH
def test_what_does_not_apply_is_refused(name: str) -> None:
    engine = engine_factory(name)(header(offloads=False))
    perform(engine, oplog.RequestOp(id="a", tokens=TOKENS), allocate("a", 4))
    for ask in (engine.offloads, lambda: engine.finalize("a", 0)):
        with pytest.raises(OperationError, match="offloads = False"):
            ask()
    engine = engine_factory(name)(header())
    perform(engine, oplog.RequestOp(id="a", tokens=TOKENS))
    with pytest.raises(OperationError, match="a running request"):
        engine.finalize("a", 0)
    perform(engine, allocate("a", 4))
    with pytest.raises(OperationError, match="in_flight = -1"):
        engine.finalize("a", -1)


@pytest.mark.parametrize("operation", [oplog.OffloadsOp(), oplog.FinalizeOp(id="a")])
def test_a_header_says_that_states_are_offered(operation: oplog.Operation) -> None:
    with pytest.raises(OperationError, match="offloads = False"):
        Lifecycle(header(offloads=False)).follow(operation)


def test_a_request_that_waits_has_no_tail() -> None:
    lifecycle = Lifecycle(header())
    lifecycle.follow(oplog.RequestOp(id="a", tokens=TOKENS))
    with pytest.raises(OperationError, match="a running request"):
        lifecycle.follow(oplog.FinalizeOp(id="a"))


def test_an_earlier_version_offers_nothing() -> None:
    with pytest.raises(ConfigError, match="offloads = True: expected version 3"):
        NumpyEngine(header(oplog=2))


def test_offers_and_blocks_to_be_zeroed_are_compared_up_to_renaming() -> None:
    renaming = Renaming([4, 4])
    renaming.answer(oplog.Allocation([[1], [2]]), oplog.Allocation([[3], [4]]))
    assert renaming.answer({}, {"a": [(0, 3, 4)]}) == {"a": [(0, 1, 4)]}
    assert renaming.answer([], [(0, 3, 4)]) == [(0, 1, 4)]
    assert renaming.answer([], [4, 5]) == [2, -5]


class Late(NumpyEngine):
    """An engine that offers states one block too far."""

    def offloads(self) -> oplog.Offers:
        return {id: [(0, block, tokens + 4) for _, block, tokens in each] for id, each in super().offloads().items()}


def test_a_state_that_is_called_longer_breaks_an_invariant() -> None:
    config = header()
    watch = Watch(Late(config), config, [INVARIANTS["offers"]])
    for operation in (oplog.RequestOp(id="a", tokens=TOKENS), allocate("a", 4)):
        watch.perform(operation)
    with pytest.raises(InvariantError, match="block 1 as the state of 8 tokens, and it is cached as"):
        watch.perform(oplog.OffloadsOp())

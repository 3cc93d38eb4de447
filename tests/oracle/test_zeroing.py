"""Blocks that are to be zeroed, in both engines."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.errors import ConfigError, OperationError
from tests.oracle.test_live_logs import allocate, header, perform

BOTH = pytest.mark.parametrize("make", [NumpyEngine, JaxEngine])
FULL = {"kind": "full_attention", "block_size": 2}
STATES = {"kind": "mamba", "block_size": 2, "num_speculative_blocks": 0}
WINDOW = {"kind": "sliding_window", "block_size": 2, "window": 3}


@BOTH
def test_new_blocks_of_attention_are_listed_once(make: Any) -> None:
    engine = make(header(groups=[FULL, STATES, WINDOW], zeroing=True, num_blocks=20))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4]), allocate("a", 4))
    rows = engine.state().rows["a"]
    assert engine.zeros() == rows[0] + rows[2]
    perform(engine, oplog.ComputedOp(id="a", tokens=4), allocate("a", 1))
    assert engine.zeros() == [engine.state().rows["a"][0][2], engine.state().rows["a"][2][2]]
    assert engine.zeros() == []


@BOTH
def test_blocks_of_a_hit_are_not_listed(make: Any) -> None:
    engine = make(header(zeroing=True))
    tokens = [1, 2, 3, 4, 5]
    perform(engine, oplog.RequestOp(id="a", tokens=tokens), allocate("a", 5), oplog.FreeOp(id="a"))
    assert engine.zeros() == [1, 2, 3]
    perform(engine, oplog.RequestOp(id="b", tokens=tokens), oplog.LookupOp(id="b"), allocate("b", 1, hit=4))
    assert engine.zeros() == [3]


@BOTH
def test_loaded_blocks_are_listed_unless_a_load_writes_them(make: Any) -> None:
    for loaded, external in (([], [1, 2]), ([0], [])):
        engine = make(header(groups=[FULL, WINDOW], zeroing=True, num_blocks=20))
        perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5]))
        perform(engine, allocate("a", 1, external=4, delay=True, loaded=loaded))
        rows = engine.state().rows["a"]
        assert rows == [[1, 2, 4], [0, 3, 5]]
        assert engine.zeros() == [*external, 4, 3, 5]
        perform(engine, oplog.UnwrittenOp(id="a", tokens=2))
        assert engine.zeros() == [2, 4, 3, 5]


@BOTH
def test_what_does_not_apply_is_refused(make: Any) -> None:
    engine = make(header())
    with pytest.raises(OperationError, match="zeroing = False"):
        engine.zeros()
    engine = make(header(zeroing=True))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3]))
    with pytest.raises(OperationError, match="a running request"):
        engine.unwritten("a", 0)
    perform(engine, allocate("a", 3))
    with pytest.raises(OperationError, match="tokens = 1: expected a multiple of group 0's block of 2"):
        engine.unwritten("a", 1)


@pytest.mark.parametrize("operation", [oplog.ZerosOp(), oplog.UnwrittenOp(id="a", tokens=0)])
def test_a_header_says_that_blocks_are_zeroed(operation: oplog.Operation) -> None:
    with pytest.raises(OperationError, match="zeroing = False"):
        Lifecycle(header()).follow(operation)


def test_groups_that_a_load_writes_exist() -> None:
    arrived = oplog.RequestOp(id="a", tokens=[1, 2, 3])
    for changes, field in (({}, "zeroing = False"), ({"zeroing": True}, "loaded = 1")):
        lifecycle = Lifecycle(header(**changes))
        lifecycle.follow(arrived)
        with pytest.raises(OperationError, match=field):
            lifecycle.follow(allocate("a", 0, external=2, loaded=[1]))


def test_an_earlier_version_zeroes_nothing() -> None:
    with pytest.raises(ConfigError, match="zeroing = True: expected version 3"):
        NumpyEngine(header(oplog=2, zeroing=True))


class Forgetful(NumpyEngine):
    """An engine whose worker is told of one block too few."""

    def zeros(self) -> list[int]:
        return super().zeros()[1:]


def test_a_block_that_is_left_out_breaks_an_invariant() -> None:
    config = header(zeroing=True)
    watch = Watch(Forgetful(config), config, [INVARIANTS["zeroing"]])
    for operation in (oplog.RequestOp(id="a", tokens=[1, 2]), allocate("a", 2)):
        watch.perform(operation)
    with pytest.raises(InvariantError, match=r"blocks \[1\] were handed out, and are not zeroed"):
        watch.perform(oplog.ZerosOp())

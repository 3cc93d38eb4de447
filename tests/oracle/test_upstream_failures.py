"""Failures of vLLM 0.33 by itself: the reference goes on, unless the defect is asked for by name."""

from __future__ import annotations

import msgspec
import pytest

from hkv.dialects.vllm.engines.engine import Engine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Header
from hkv.errors import EngineFailure, HKVError
from hkv.oracle.engines import engine_factory
from tests.oracle.sample import HEADER
from tests.oracle.test_installed_vllm import foreign_warnings

TAIL = msgspec.convert(
    {
        **HEADER,
        "oplog": 2,
        "num_blocks": 40,
        "groups": [
            {"kind": "sliding_window", "block_size": 2, "window": 7},
            {"kind": "mamba", "block_size": 4},
            {"kind": "full_attention", "block_size": 1},
        ],
        "hash_block_size": 1,
        "scheduler_block_size": 4,
        "eagle": True,
        "prefill_lookahead": 3,
    },
    Header,
)


def grow(engine: Engine, new: int) -> Allocation:
    fields = {"hit": 0, "lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}
    return engine.allocate(oplog.AllocateOp(id="r1", new=new, **fields))


def outlive(engine: Engine) -> Allocation:
    """The prompt's last state is registered at 3 tokens when 5 are computed, in the next column."""
    engine.request("r1", [4, 4, 4, 1], None)
    for new, appended in ((1, []), (3, [1]), (1, [4])):
        assert grow(engine, new).blocks is not None
        engine.advance("r1", new)
        engine.append("r1", appended)
    engine.commit("r1", 5)
    return grow(engine, 1)


def test_tail_key_outlives_state() -> None:
    engine = NumpyEngine(TAIL)
    assert outlive(engine).blocks is not None
    state = engine.state()
    assert not {str(block) for block in state.free} & set(state.refs)
    assert engine.copies() == []


def test_tail_key_outlives_state_by_name() -> None:
    with pytest.raises(EngineFailure, match="given back"):
        outlive(NumpyEngine(msgspec.structs.replace(TAIL, bugs=["tail-key-outlives-state"])))


@pytest.mark.vllm
@foreign_warnings
def test_tail_key_outlives_state_in_vllm() -> None:
    with pytest.raises(HKVError, match="vLLM not to raise AssertionError"):
        outlive(engine_factory("vllm")(TAIL))

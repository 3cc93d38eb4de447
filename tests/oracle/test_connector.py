"""Questions of a connector to the cache: hits that diverge between groups, and hits that are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.engines.engine import apply, missing_methods
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import ConnectorHit, Header
from hkv.errors import FileError, OperationError
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.record import differ, draw

FULL = {"kind": "full_attention", "block_size": 4, "cp_sharded": False}
STATE = {
    "kind": "mamba",
    "block_size": 4,
    "num_speculative_blocks": 0,
    "num_prefill_checkpoint_blocks": 0,
    "prefill_checkpoint_alignment": None,
}


def header(*groups: dict[str, Any], oplog: int = 4) -> Header:
    made, _ = draw("core", 0, 4)
    values: dict[str, Any] = {"groups": list(groups), "oplog": oplog, "num_blocks": 40, "max_model_len": 64}
    values |= {"hash_block_size": 4, "scheduler_block_size": 4, "partial_hits": False, "caching": True}
    values |= {"bugs": [], "watermark": 0.0, "offloads": False, "zeroing": False, "hash": "sha256_cbor"}
    return msgspec.structs.replace(made, **values)


def allocate(id: str, new: int, **fields: Any) -> oplog.AllocateOp:
    plain = {"hit": 0, "lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}
    return oplog.AllocateOp(id=id, new=new, **{**plain, **fields})


def filled(perform: Callable[[oplog.Operation], Any], *, lost: int) -> list[list[int]]:
    """Rows of 16 tokens that were computed and freed, after the block of one group lost its key."""
    for operation in (oplog.StepOp(), oplog.RequestOp(id="a", tokens=list(range(16))), allocate("a", 16)):
        perform(operation)
    rows = perform(oplog.StateOp()).rows["a"]
    for operation in (oplog.AdvanceOp(id="a", tokens=16), oplog.FreeOp(id="a"), oplog.StepOp()):
        perform(operation)
    perform(oplog.EvictOp(blocks=[rows[lost][3]]))
    perform(oplog.RequestOp(id="b", tokens=list(range(20))))
    return rows


@pytest.mark.parametrize("factory", [NumpyEngine, JaxEngine])
def test_the_hit_of_full_attention_counts_where_the_state_is_gone(factory: type) -> None:
    engine = factory(header(FULL, STATE))
    rows = filled(functools.partial(apply, engine), lost=1)
    found = engine.connector_lookup("b", None)
    assert (found.hit, found.diverged, found.shared_prefix) == (16, True, 0)
    assert found.hits[0] == 16 > found.hits[1]
    assert found.blocks[0] == rows[0]
    assert engine.lookup("b").hit == found.hits[1]
    assert engine.connector_lookup("b", 11).hit == 8


@pytest.mark.parametrize("factory", [NumpyEngine, JaxEngine])
def test_a_hit_that_is_cut_keeps_its_beginning(factory: type) -> None:
    engine = factory(header(FULL, STATE))
    assert engine.truncate([[1, 2, 3], [0, 4]], 8) == [[1, 2], [0, 4]]
    assert engine.truncate([[1, 2, 3], [4]], 12) == [[1, 2, 3], [4]]  # a load brings the state
    assert engine.truncate([[], []], 0) == [[], []]


@pytest.mark.parametrize(
    ("rows", "tokens", "message"),
    [
        ([[1]], 4, "1 rows: expected one for each of 2 groups"),
        ([[1], []], 3, "tokens = 3: expected a multiple of group 0's block of 4"),
        ([[1], []], 8, "at most the 4 of group 0's row"),
        ([[99], []], 4, "rows = 99"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(rows: list[list[int]], tokens: int, message: str) -> None:
    with pytest.raises(OperationError) as refused:
        Lifecycle(header(FULL, STATE)).follow(oplog.TruncateOp(rows=rows, tokens=tokens))
    assert message in str(refused.value).replace("'", "").replace("group 0s", "group 0's")


def test_its_hit_is_adopted_by_rows_alone() -> None:
    lifecycle = Lifecycle(header(FULL, STATE))
    lifecycle.follow(oplog.RequestOp(id="a", tokens=[1] * 8))
    found = oplog.ConnectorLookupOp(id="a")
    lifecycle.follow(found)
    lifecycle.answered(found, ConnectorHit(4, [[1], []], 0, True, [4, 0]))
    with pytest.raises(OperationError, match="hit = 4"):
        lifecycle.follow(allocate("a", 1, hit=4))
    lifecycle.follow(allocate("a", 1, hit=4, external=4, rows=[[1], []]))


def test_a_state_that_nobody_supplies_is_named() -> None:
    """A scheduler that goes on from a diverged hit without a load breaks `supplied`; with a load of the rest it may."""
    for external, broken in ((0, True), (2, False)):
        watch = Watch(NumpyEngine(header(FULL, STATE)), header(FULL, STATE), [INVARIANTS["supplied"]])
        filled(watch.perform, lost=1)
        found = watch.perform(oplog.ConnectorLookupOp(id="b"))
        assert isinstance(found, ConnectorHit)
        adopt = allocate("b", 1, hit=found.hit, external=external, rows=found.blocks)
        if broken:
            with pytest.raises(InvariantError, match=r"group 1 (lacks column 3|holds no block)"):
                watch.perform(adopt)
        else:
            watch.perform(adopt)


def test_earlier_versions_do_not_know_it() -> None:
    early = header(FULL, STATE, oplog=3)
    for operation in (oplog.ConnectorLookupOp(id="a"), oplog.TruncateOp(rows=[[], []], tokens=0)):
        with pytest.raises(FileError, match="version 4 of the log format"):
            parse_log(log_bytes(early, [operation], [None]), "log")
    engine = object()
    assert missing_methods(engine, 4)[-2:] == ("connector_lookup", "truncate")
    assert set(missing_methods(engine, 4)) - set(missing_methods(engine, 3)) == {"connector_lookup", "truncate"}


@pytest.mark.parametrize("feature", ["external", "partial"])
def test_engines_agree_about_traffic_of_a_connector(feature: str) -> None:
    told = 0
    for seed in range(2):
        recording, parted = differ(JaxEngine, NumpyEngine, feature, seed, 4, 10)
        assert parted is None, parted
        told += sum(isinstance(each, ConnectorHit) for each in recording.answers)
    assert told

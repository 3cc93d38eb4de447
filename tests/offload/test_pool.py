"""The tier's pool of chunks by itself: held against vLLM 0.33.0's manager, its invariants, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.contract import registry
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.numpy import NumpyPool
from hkv.dialects.vllm.offload.traffic import POOL_FEATURES
from hkv.errors import ConfigError, OperationError
from hkv.oracle.comparison import Comparison
from hkv.oracle.record import Only, record

DIALECT = registry.dialect_of(structs.CHUNKS)


def header(chunks: int = 4, **options: Any) -> structs.Header:
    groups = [{"kind": "full_attention", "block_size": 1}]
    return structs.Header(dialect=structs.CHUNKS, feature="hand", num_blocks=[chunks], groups=groups, **options)


def store(id: str, job: int, names: str, first: int = 1) -> structs.StoreOp:
    return structs.StoreOp(id=id, job=job, keys=[(name, 0, place) for place, name in enumerate(names, first)])


@pytest.mark.vllm
@pytest.mark.parametrize("feature", POOL_FEATURES)
def test_reference_agrees_with_vllm(feature: str) -> None:
    compared = Comparison(("vllm-offload", "numpy"), Only(dialect=structs.CHUNKS))
    assert not any(compared.seed(feature, seed) for seed in range(12))


@pytest.mark.parametrize("feature", POOL_FEATURES)
def test_random_traffic_breaks_no_invariant(feature: str) -> None:
    for seed in range(6):
        record(
            lambda given: DIALECT.watch(NumpyPool(given), given),
            feature,
            seed,
            2,
            12,
            Only(dialect=structs.CHUNKS),
        )


def test_a_prompt_longer_than_the_tier_leaves_a_hole_in_itself() -> None:
    """Of one request the last positions leave first, and an offer of more chunks than the tier has stores nothing."""
    engine = NumpyPool(header(4))
    engine.perform(structs.BeginOp(id="a"))
    evicted = []
    for job, names in enumerate(("ab", "cd", "ef")):
        evicted += engine.perform(store("a", job, names, 2 * job + 1)).evicted
        engine.perform(structs.DoneOp(job=job))
    assert evicted == [("d", 0), ("c", 0)]
    assert [engine.pool.lookup((name, 0)) for name in "abcdef"] == [True, True, None, None, True, True]
    assert engine.perform(store("a", 9, "ghijk", 7)).keys is None


def test_what_cannot_come_is_refused_and_changes_nothing() -> None:
    engine = NumpyPool(header())
    for operation in (structs.BeginOp(id="a"), store("a", 1, "ab")):
        engine.perform(operation)
    before = engine.perform(structs.StateOp())
    for operation in (
        structs.BeginOp(id="a"),
        structs.EndOp(id="b"),
        store("b", 2, "c"),
        store("a", 1, "c"),
        store("a", 2, "cc"),
        structs.LoadOp(id="a", job=2, keys=[("a", 0, 1)]),
        structs.DoneOp(job=2),
    ):
        with pytest.raises(OperationError):
            engine.perform(operation)
    assert engine.perform(structs.StateOp()) == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"policy": "fifo"}, "policy"), ({"tracked": 0}, "tracked"), ({"bugs": ["x"]}, "bugs"), ({"oplog": 1}, "oplog")],
)
def test_a_tier_that_vllm_does_not_have_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        NumpyPool(header(**changes))
    assert error.value.argument == field

"""The compiled engine under SGLang's rules, which is the text lowered: it answers as it does plainly, state and all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hkv.contract import registry
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.engines.jax import SGLangJaxEngine
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.errors import ConfigError, OperationError
from hkv.oracle.record import Only, differ, draw

ONLY = Only(dialect=structs.NAME)


@pytest.mark.parametrize("feature", ["full", "window", "states", "eagle", "namespaces", "sorted"])
def test_random_operations_leave_the_same_state(feature: str) -> None:
    for seed in range(6):
        recording, parted = differ(SGLangJaxEngine, SGLangNumpyEngine, feature, seed, 2, 12, only=ONLY)
        assert parted is None, (seed, parted, recording.operations[-1])


@pytest.mark.parametrize("feature", ["states", "eagle", "sorted"])
@pytest.mark.parametrize("bugs", [(), sorted(BUGS)])
def test_requests_end_before_their_last_pass(feature: str, bugs: Sequence[str]) -> None:
    """With the defects of 0.5.23, and without: which of the states that it kept is entered, and what is freed."""
    dialect, beyond = registry.dialect_of(structs.NAME), 0
    for seed in range(8):
        header, choices = draw(feature, seed, 2, ONLY)
        header = msgspec.structs.replace(header, bugs=list(bugs))
        reference, compiled = SGLangNumpyEngine(header), SGLangJaxEngine(header)

        def perform(operation: structs.Operation, both: Any = (reference, compiled), choices: Any = choices) -> Any:
            nonlocal beyond
            if isinstance(operation, structs.FinishOp):
                request, config = both[0].request(operation.id), both[0].config
                protected = request.protected * config.page_size
                most, least = request.length, max(1, protected + config.bigrams)
                operation.length = choices.integer(max(least, most - 2), most)
                beyond += request.tracked > operation.length
                if protected and config.bigrams:
                    short = structs.FinishOp(id=operation.id, length=protected)
                    for engine in both:
                        with pytest.raises(OperationError, match="length"):
                            engine.perform(short)
            want, got = (engine.perform(operation) for engine in both)
            assert dialect.compare(want, got, 2) is None, operation
            return want

        dialect.drive(header, choices, perform, 10)
        assert reference.evictions == compiled.evictions
    assert (beyond > 0) == (feature == "states")


def test_a_copy_goes_its_own_way() -> None:
    header, choices = draw("full", 0, 2, ONLY)
    engine = SGLangJaxEngine(header)
    registry.dialect_of(structs.NAME).drive(header, choices, engine.perform, 5)
    before = engine.perform(structs.StateOp())
    other = copy.deepcopy(engine)
    other.perform(structs.AdmitOp(id="another", tokens=[1, 2, 3]))
    assert engine.perform(structs.StateOp()) == before
    assert other.perform(structs.StateOp()).requests.keys() == {*before.requests, "another"}


def test_a_tree_alone_is_refused_by_name() -> None:
    attention = {"kind": "full_attention", "block_size": 1}
    with pytest.raises(ConfigError) as error:
        SGLangJaxEngine(structs.Header(dialect=structs.NAME, num_blocks=[4], groups=[attention], feature="", tree=True))
    assert error.value.argument == "tree"

"""The compiled cache under RTP-LLM's rules against the reference: every answer and the whole state, operation by
operation, at random and along ways that exploring finds.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.answer import Failure, compare
from hkv.contract.log import Log, describe
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.engines.jax import RtpJaxEngine
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import to_rtp_header
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from tests.rtp_llm.build import dsv4_allocator
from tests.rtp_llm.explored import SPACES, explored, world
from tests.rtp_llm.traffic import draw_config, draw_operation

STEPS = 40


class DifferenceError(AssertionError):
    """The two engines differ."""


def lockstep(rng: random.Random, steps: int = STEPS, config: RtpConfig | None = None) -> Counter[str]:
    """Random operations on both; what became of them, by name."""
    header = to_rtp_header(draw_config(rng) if config is None else config, "random")
    reference, compiled = RtpNumpyEngine(header), RtpJaxEngine(header)
    seen: Counter[str] = Counter()
    for number in range(steps):
        operation = draw_operation(rng, number, reference)
        want, got = attempt_rtp(reference, operation), attempt_rtp(compiled, operation)
        if isinstance(want, Failure) and isinstance(got, Failure):
            want = got
        told = want == got, reference.state() == compiled.state(), reference.evictions == compiled.evictions
        if not all(told):
            raise DifferenceError(f"{describe(operation)}: {want} but {got}, {told}\n{header}")
        seen[outcome(operation, want)] += 1
    return seen


def outcome(operation: structs.RtpOp, answer: structs.RtpAnswer | Failure) -> str:
    name = str(type(operation).__struct_config__.tag)
    if isinstance(answer, Failure):
        return f"{name} failed"
    if isinstance(answer, structs.Malloc):
        return f"{name} {answer.verdict}{' with a hit' if answer.reused else ''}"
    refused = (isinstance(answer, structs.Fork) and answer.copies is None) or (
        isinstance(answer, structs.Selected) and answer.keys is None
    )
    return f"{name} refused" if refused else name


def test_random_operations() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += lockstep(random.Random(seed))
    wanted = {
        *("malloc granted", "malloc granted with a hit", "malloc permanent", "malloc retryable"),
        *("malloc internal_error", "append", "insert", "insert failed", "fork", "fork refused"),
        *("fork failed", "free", "drop", "drop failed", "hold", "hold refused", "release", "export"),
        *("export refused", "settle", "evict", "peak", "request", "request failed"),
    }
    assert wanted <= set(seen), "the traffic reaches every answer"


@settings(max_examples=25)
@given(rng=st.randoms(use_true_random=False))
def test_shrinking_operations(rng: random.Random) -> None:
    lockstep(rng, 25)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_groups_of_deepseek_v4(ranks: int) -> None:
    """Seven of them, compact ones among them; random configurations have three at most."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        config = dsv4_allocator(num_blocks=(60, 30, 12)[seed % 3], cp_size=ranks, linear_step=1 + seed % 2).config
        seen += lockstep(random.Random(seed), config=config)
    assert {"malloc granted with a hit", "insert", "fork", "hold", "evict"} <= set(seen), seen


def test_a_window_without_its_last_blocks() -> None:
    """A hit brings a window without reuse no block, so that the one before the last is missing: an error, no trace."""
    header = structs.RtpHeader(
        oplog=2,
        dialect="rtp-llm/hybrid-pool",
        feature="tail",
        num_blocks=[20, 20],
        groups=[
            structs.RtpGroup(tag="full", type="FULL", block_size=4),
            structs.RtpGroup(tag="window", type="SWA", block_size=4, enable_prefix_reuse=False),
        ],
        block_size=4,
    )
    engines = RtpNumpyEngine(header), RtpJaxEngine(header)
    operations: list[structs.RtpOp] = []
    for id in ("a", "b"):
        operations += [structs.RequestOp(id=id, tokens=[*range(9)]), structs.MallocOp(id=id), structs.InsertOp(id=id)]
    for operation in operations[:5]:
        want, got = (attempt_rtp(engine, operation) for engine in engines)
        assert isinstance(want, Failure) == isinstance(got, Failure) == (operation is operations[4])
        assert isinstance(want, Failure) or want == got
        assert engines[0].state() == engines[1].state()
    for answer in (want, got):
        assert "the last blocks of a window to be there" in answer.message  # type: ignore[union-attr]


def test_a_recorded_log_agrees_where_the_reference_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that the reference gave are checked against the compiled cache alone."""
    rng = random.Random(5)
    header = to_rtp_header(draw_config(rng), "recorded")
    reference = RtpNumpyEngine(header)
    operations: list[structs.RtpOp] = []
    for number in range(60):
        operation = draw_operation(rng, number, reference)
        answer = attempt_rtp(reference, operation)
        if not isinstance(answer, Failure):
            answered = {"want": answer} if hasattr(operation, "want") else {}
            operations.append(msgspec.structs.replace(operation, **answered))
    operations.append(structs.StateOp(want=reference.state()))
    log = Log("recorded", header, tuple(operations))
    for name in list(sys.modules):
        if name.split(".")[0] == "reference":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        importlib.import_module("reference.state.lru")
    assert check_log(log, engine_factory("jax")) is None
    assert len(log.operations) > 40


WAYS = 40


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_the_compiled_cache_answers_alike_along_explored_ways(name: str, tree: bool) -> None:
    """A random sample, and the longest ways."""
    search = explored(name, tree=tree)
    states = search.report.states
    chosen = {*random.Random(0).sample(range(states), WAYS // 2), *range(states - WAYS // 2, states)}
    header = world(name, tree=tree).header
    for state in sorted(chosen):
        compiled, plain = RtpJaxEngine(header), RtpNumpyEngine(header)
        for operation in (*search.way(state), structs.StateOp()):
            want, got = plain.perform(operation), compiled.perform(operation)
            assert compare(want, got) is None, (search.way(state), operation)

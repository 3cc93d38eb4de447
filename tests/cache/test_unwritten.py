"""Hits on what this very step writes: the compiled cache beside the reference."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import AllocateOp, Answer, LookupOp, Operation
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.spec import FullAttention, Mamba
from hkv.state.status import Status
from reference.dialects.vllm.fork import fork
from reference.dialects.vllm.kinds.full_attention import FullAttentionKind
from tests.cache.build import config, prompt, run, start, statuses
from tests.suites import siblings

SEEDS = range(60)


def lockstep(seed: int) -> None:
    header, play = siblings.SUITE.begin(RandomChoices(seed), "partial")
    compiled, reference = JaxEngine(header), NumpyEngine(header)

    def perform(operation: Operation) -> Answer:
        want = apply(reference, operation)
        assert compare(want, apply(compiled, operation), header.oplog) is None, f"{operation}\n{header}"
        return want

    play(perform)


def test_both_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    asked = FullAttentionKind.waits

    def waits(self: FullAttentionKind, hit: Any, demand: Any) -> bool:
        waited.append(asked(self, hit, demand))
        return waited[-1]

    monkeypatch.setattr(FullAttentionKind, "waits", waits)
    for seed in SEEDS:
        lockstep(seed)
    assert sum(waited) > 3


def many_seeds() -> None:
    """Seeds by which planted defects are judged (`tests/mutants`)."""
    for seed in range(600):
        lockstep(seed)


def test_what_a_fork_copies_is_not_written_either() -> None:
    settings = config(
        FullAttention(block_size=16),
        Mamba(block_size=32),
        hash_block_size=4,
        scheduler_block_size=32,
        partial_hits=True,
    )
    engine = NumpyEngine(to_header(settings, "partial"))
    manager = engine.manager
    no = {"external": 0, "lookahead": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}
    batch = Batch().add(Code.REQUEST, 0, range(4), tokens=16)
    batch.add(Code.ALLOCATE, 0, new=12, hit=0, shared_prefix=-1, advance=1)
    engine.request_keyed("a", 16, range(4))
    apply(engine, AllocateOp(id="a", new=12, hit=0, **no))
    engine.advance("a", 12)
    engine.step()
    batch.add(Code.STEP)
    fork(manager, "a", "b")
    batch.add(Code.FORK, 0, tokens=1)
    apply(engine, AllocateOp(id="b", new=4, hit=0, **no))
    batch.add(Code.ALLOCATE, 1, new=4, hit=0, shared_prefix=-1, advance=1)
    engine.advance("b", 4)
    wanted = []
    for name, slot in (("c", 2), ("d", 3)):
        engine.request_keyed(name, 19, range(4))
        found = apply(engine, LookupOp(id=name))
        assert found.hit == 12
        assert found.blocks[0] == manager.rows("b")[0]
        granted = apply(engine, AllocateOp(id=name, new=7, hit=12, **no))
        wanted.append(granted.blocks is None)
        engine.step()
        batch = prompt(batch, slot, range(4), tokens=19).add(Code.STEP)
    assert wanted == [True, False]
    parameters, state = start(settings)
    _, results = run(parameters, state, batch)
    late = [place for place, status in enumerate(statuses(results, batch)) if status == Status.NOT_YET_WRITTEN]
    assert late == [7]
    assert set(statuses(results, batch)) == {Status.OK, Status.NOT_YET_WRITTEN}

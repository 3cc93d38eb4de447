"""Every invariant, under random traffic on the reference; and how much that traffic meets."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config, to_header
from hkv.dialects.vllm.log.structs import Answer, Operation
from hkv.dialects.vllm.traffic.headers import FEATURES
from hkv.dialects.vllm.traffic.hit_comparison import make_config
from hkv.dialects.vllm.traffic.live import drive
from hkv.model.topology import Topology
from hkv.oracle.log_file import read_log
from hkv.spec import FullAttention, Mamba, OpaqueState
from hkv.testing.strategies import HypothesisChoices, headers
from tests.suites import alone
from tests.suites.alone import Alone, blocks_at_once, completion, draw_alone, refused_after

LOGS = sorted((pathlib.Path(__file__).resolve().parent.parent / "data" / "oplogs").glob("*.jsonl"))
COUNTED = ("hit", "eviction", "refusal", "preemption")
EXAMPLES = settings.default.max_examples


def seeds():
    """Strategy for the decisions of long traffic: cheap, but it shrinks only as a whole."""
    return st.integers(0, 1 << 32).map(RandomChoices)


@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
@settings(max_examples=EXAMPLES * 3 // 5)
def test_invariants_hold_under_long_traffic(feature, data):
    header, steps = data.draw(headers([feature])), data.draw(st.integers(1, 16))
    watch = Watch(NumpyEngine(header), header)
    drive(header, data.draw(seeds()), watch.perform, steps)


@given(data=st.data())
def test_invariants_hold_under_short_traffic_that_shrinks(data):
    header, steps = data.draw(headers()), data.draw(st.integers(1, 6))
    watch = Watch(NumpyEngine(header), header)
    drive(header, HypothesisChoices(data), watch.perform, steps)


class Meter:
    """Counts what one example meets."""

    def __init__(self, header):
        self.engine = NumpyEngine(header)
        self.watch = Watch(self.engine, header, ())
        self.met: collections.Counter[str] = collections.Counter()
        self.freed: set[str] = set()

    def perform(self, operation: Operation) -> Answer:
        answer = self.watch.perform(operation)
        match operation:
            case oplog.LookupOp():
                self.met["preemption"] += operation.id in self.freed
            case oplog.AllocateOp() if answer.blocks is None:
                self.met["refusal"] += 1
            case oplog.AllocateOp():
                self.met["hit"] += operation.hit > 0
            case oplog.FreeOp():
                self.freed.add(operation.id)
            case _:
                pass
        self.met["eviction"] = self.engine.evictions
        return answer


def test_random_traffic_meets_hits_evictions_refusals_and_preemptions():
    met: collections.Counter[str] = collections.Counter()
    examples = 0

    @seed(2024)
    @settings(database=None, max_examples=100)
    @given(data=st.data())
    def count(data):
        nonlocal examples
        header, steps = data.draw(headers()), data.draw(st.integers(1, 16))
        meter = Meter(header)
        drive(header, data.draw(seeds()), meter.perform, steps)
        examples += 1
        met.update(name for name in COUNTED if meter.met[name])

    count()
    shares = {name: met[name] / examples for name in COUNTED}
    assert all(share >= 0.10 for share in shares.values()), shares


@given(data=st.data())
@settings(max_examples=30)
def test_an_emptied_cache_is_like_a_new_one(data):
    header, steps = data.draw(headers()), data.draw(st.integers(1, 16))
    engine = NumpyEngine(header)
    watch = Watch(engine, header, ())
    drive(header, data.draw(seeds()), watch.perform, steps)
    for id, record in list(watch.ledger.requests.items()):
        if record.running:
            watch.perform(oplog.FreeOp(id=id))
    watch.perform(oplog.CopiesOp())
    assert watch.perform(oplog.ResetOp()) == oplog.Reset(True)
    emptied, new = engine.state(), NumpyEngine(header).state()
    assert (sorted(emptied.free), emptied.refs, emptied.rows, emptied.cached) == (new.free, {}, {}, {})


def tails(specs, num_blocks, hash_block_size, **fields):
    """Hits inside blocks, with drafts, in steps of three tokens at most."""
    return VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=num_blocks,
        hash_block_size=hash_block_size,
        scheduler_block_size=math.lcm(*(spec.block_size for spec in specs)),
        eagle=True,
        partial_hits=True,
        max_model_len=400,
        max_in_flight_tokens=3,
        **fields,
    )


def test_a_copied_tail_gives_its_block_back_when_its_step_ends(monkeypatch):
    """Met by chance: the last token of 61 has a block where copies are made after each step, and none where not."""
    config = tails([Mamba(block_size=12), FullAttention(block_size=6)], num_blocks=14, hash_block_size=3)
    case = Alone(to_header(config, "partial"), 61, (3,) * 61)
    assert refused_after(case) is None
    monkeypatch.setattr(NumpyEngine, "copies", lambda self: [])
    assert refused_after(case) == 60


def test_a_tail_is_copied_beside_two_states():
    """A pool that vLLM 0.33 starts with, and whose only request it refuses at its last three tokens."""
    full = FullAttention(block_size=8)
    specs = [full, OpaqueState(block_size=4), full, Mamba(block_size=4)]
    config = tails(specs, num_blocks=14, hash_block_size=2, shared_prefix_checkpoint=True)
    case = Alone(to_header(config, "partial"), 33, (3,) * 33)
    assert refused_after(case) == 30
    assert blocks_at_once(config, case.length) == config.num_blocks
    roomy = dataclasses.replace(config, num_blocks=15)
    assert refused_after(dataclasses.replace(case, header=to_header(roomy, "partial"))) is None


def test_most_cases_of_a_request_alone_are_checked(monkeypatch):
    """All but pools with Mamba groups that no engine would start with."""
    played = 0

    def play(case):
        nonlocal played
        played += 1

    monkeypatch.setattr(alone, "refused_after", play)
    for number in range(400):
        case = draw_alone(RandomChoices(number))
        config = to_config(case.header)
        before = played
        list(completion.check(case))
        if played == before:
            assert any(isinstance(spec, Mamba) for spec in config.topology.specs)
            assert config.num_blocks - 1 < blocks_at_once(config, case.length)
    assert played > 0.8 * 400


def test_a_pool_of_one_state_a_group_admits_what_it_cannot_finish():
    """Three Mamba groups over three blocks: the first chunk fits, the second needs the old state and a new one."""
    config = dataclasses.replace(make_config([Mamba(block_size=2)] * 3, []), num_blocks=4)
    case = Alone(to_header(config, "core"), 3, (2, 1))
    assert refused_after(case) == 2
    assert config.num_blocks - 1 < blocks_at_once(config, case.length)


def test_every_invariant_says_what_it_promises():
    for invariant in INVARIANTS.values():
        text = invariant.check.__doc__ or ""
        assert "Holds after" in text, invariant.name
        assert "exception" in text.lower(), invariant.name
        assert invariant.dialect == "vllm-0.33"


@pytest.mark.parametrize("path", LOGS[::6], ids=lambda path: path.stem)
def test_a_recorded_log_keeps_every_invariant(path: pathlib.Path) -> None:
    """A real engine answered it; shadow tags included."""
    log = read_log(str(path))
    watch = Watch(NumpyEngine(log.header), log.header)
    for operation in log.operations:
        watch.perform(operation)

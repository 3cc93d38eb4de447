"""Every invariant, under random traffic on the reference; and how much that traffic meets."""

from __future__ import annotations

import collections
import dataclasses

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from hkv.oracle import oplog
from hkv.oracle.configuration import to_config, to_header
from hkv.oracle.engines.numpy import NumpyEngine
from hkv.oracle.oplog import Answer, Operation
from hkv.spec import Mamba, OpaqueState
from hkv.testing.choices import RandomChoices
from hkv.testing.headers import FEATURES
from hkv.testing.hit_comparison import make_config
from hkv.testing.invariants import INVARIANTS, Watch
from hkv.testing.strategies import HypothesisChoices, headers
from hkv.testing.traffic import drive

COUNTED = ("hit", "eviction", "refusal", "preemption")
EXAMPLES = settings.default.max_examples


def seeds():
    """Where the decisions of long traffic come from: cheap, but it shrinks only as a whole."""
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


@given(data=st.data())
@settings(max_examples=60)
def test_a_request_that_fits_alone_finishes_alone(data):
    """What `must_fit` admits into an empty pool is never refused on its way to its last token, chunk by chunk.

    Exception: a pool without room for two states (and scratch) of each Mamba group beside the request's other blocks:
    the gate counts one state. vLLM 0.33 turns such a pool away at start-up (`MambaSpec.max_memory_usage_bytes`).
    """
    header = data.draw(headers([feature for feature in FEATURES if feature != "external"]))
    choices = HypothesisChoices(data)
    length = choices.integer(1, min(64, header.max_model_len))
    limit = header.max_in_flight_tokens or header.max_model_len
    chunks = [min(choices.integer(1, 3) * header.scheduler_block_size, limit) for _ in range(length)]
    stuck = run_alone(header, length, chunks)
    small = has_states(header) and header.num_blocks - 1 < blocks_needed(header, length)
    assert stuck is None or small, f"admitted, and refused after {stuck} tokens"


def run_alone(header, length, chunks):
    """Tokens after which a request that was admitted is refused, or None."""
    engine = NumpyEngine(header)
    engine.request("alone", [0] * length, None)
    computed = 0
    for chunk in chunks:
        new = min(chunk, length - computed)
        # The gate is for admission: it counts blocks before any is retired, so a running request would be turned away.
        gate = computed == 0
        operation = oplog.AllocateOp(
            id="alone", new=new, hit=0, lookahead=0, external=0, delay=False, must_fit=gate, reserved=0, in_flight=0
        )
        if engine.allocate(operation).blocks is None:
            return computed or None
        engine.advance("alone", new)
        computed += new
        if computed == length:
            break
    return None


def blocks_needed(header, length):
    """Blocks a request of `length` tokens may hold at once, as vLLM 0.33 reckons: two states a Mamba group."""
    config = to_config(header)
    total = 0
    for group, spec in enumerate(config.topology.specs):
        if isinstance(spec, Mamba):
            total += 2 + spec.num_speculative_blocks + spec.num_prefill_checkpoint_blocks
        else:
            total += 1 if isinstance(spec, OpaqueState) else -(-length // config.block_size(group))
    return total


def has_states(header):
    return any(isinstance(spec, Mamba) for spec in to_config(header).topology.specs)


def test_a_pool_of_one_state_a_group_admits_what_it_cannot_finish():
    """Three Mamba groups over three blocks: the first chunk fits, the second needs the old state and a new one."""
    config = make_config([Mamba(block_size=2)] * 3, [])
    header = to_header(dataclasses.replace(config, num_blocks=4), "core")
    assert run_alone(header, 3, [2, 1]) == 2
    assert header.num_blocks - 1 < blocks_needed(header, 3)


def test_every_invariant_says_what_it_promises():
    for invariant in INVARIANTS.values():
        text = invariant.check.__doc__ or ""
        assert "Holds after" in text, invariant.name
        assert "exception" in text.lower(), invariant.name
        assert invariant.dialect == "vllm-0.33"

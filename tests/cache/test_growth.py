"""Room for more requests, keys and events than at first: what is there stays, and nothing is cut off."""

from __future__ import annotations

import jax
import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines import jax_batches
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import AllocateOp, LookupOp, RequestOp
from hkv.dialects.vllm.rules.operations import Batch
from hkv.dialects.vllm.traffic.traffic import draw_header
from hkv.spec import FullAttention
from tests.cache.build import config
from tests.reference.build import PLAIN


def test_a_larger_state_says_the_same() -> None:
    """`tests/slow/cache/test_cache.py` goes on with one."""
    engine = JaxEngine(draw_header(RandomChoices(14), "core", 2))
    engine.run([RequestOp(id=str(n), tokens=list(range(9 + n))) for n in range(32)])
    engine.run([AllocateOp(id="0", new=9, hit=0, **PLAIN), LookupOp(id="5")])
    before, old = engine.state(), engine._dispatcher.buckets
    assert before.rows
    assert before.cached
    engine.request("more", [9], None)
    found = engine._dispatcher
    assert (found.buckets.requests, found.slot()) == (4 * old.requests, 33)
    found._batch, found._waiting = Batch(), []  # nothing is to run with the larger state
    found.fit_keys(old.keys + 1)
    assert found.buckets.keys > old.keys
    assert len(found.state.rows) == found.buckets.requests + 1
    slots = {id: request.slot for id, request in engine._requests.items() if id != "more"}
    assert engine._reader.state(jax.device_get(found.state), slots) == before


def test_events_beyond_the_least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is that of the program that all of these tests run, the least of it a quarter."""
    usual = jax_batches.EVENTS
    specs = [FullAttention(block_size=size) for size in (1, 2, 4)]
    header = to_header(config(*specs, num_blocks=250, hash_block_size=1), "core")
    engine, reference = JaxEngine(header), NumpyEngine(header)
    for each in (engine, reference):
        each.request("a", list(range(96)), None)
    assert engine.events() == []
    monkeypatch.setattr(jax_batches, "EVENTS", usual // 4)
    allocation = AllocateOp(id="a", new=96, hit=0, **PLAIN)
    apply(reference, allocation)
    engine._allocate(allocation)
    assert usual // 4 < engine._dispatcher._room.events <= usual
    assert engine.events() == reference.events() != []
    assert engine.state() == reference.state()

"""Promises of a compiled program besides its answers: few compilations, no transfers, no reference, room that grows."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.engines import jax_batches
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.configuration import to_config, to_header
from hkv.dialects.vllm.log.structs import AllocateOp, LookupOp, RequestOp
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.dialects.vllm.rules.parameters import of_config
from hkv.dialects.vllm.traffic.traffic import FEATURES, draw_header
from hkv.errors import ConfigError
from hkv.machine.operations import bucket, nearest
from hkv.spec import FullAttention
from hkv.state.state import ENTRIES, Buckets
from tests.cache.build import config, operations, program, prompt, run, start
from tests.reference.build import PLAIN


def test_a_thousand_configurations_share_a_handful_of_sizes() -> None:
    found = set()
    for seed in range(1000):
        choices = RandomChoices(seed)
        settings = to_config(draw_header(choices, FEATURES[seed % len(FEATURES)], 1 + seed % 2))
        buckets = cache.buckets_for(settings)
        of_config(settings, buckets.groups)
        found.add(buckets)
    assert len(found) <= 2


def test_configurations_with_the_same_sizes_share_a_program() -> None:
    before = cache.count_programs()
    for seed in range(60):
        engine = JaxEngine(draw_header(RandomChoices(seed), FEATURES[seed % len(FEATURES)]))
        engine.request("a", list(range(9)), None)
        engine.lookup("a")
    assert cache.count_programs() <= before + 2


def test_nothing_is_transferred_between_inputs_and_outputs() -> None:
    parameters, state = start()
    batch = jax.device_put(operations(prompt(Batch(), 0, range(9)).add(Code.FREE, 0)))
    compiled = program()
    with jax.transfer_guard("disallow"):
        state, results = compiled(parameters, state, batch)
        jax.block_until_ready((state, results))
    assert np.asarray(results.table)[2, 0] == 0


def test_the_state_is_donated() -> None:
    parameters, state = start()
    run(parameters, state, Batch().add(Code.STEP))
    assert all(array.is_deleted() for array in jax.tree.leaves(state))


def test_states_are_small_pytrees() -> None:
    assert len(jax.tree.leaves(start()[1])) <= 9


SCRIPT = """
import sys
sys.modules["reference"] = None
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.traffic.headers import draw_header
header = draw_header(RandomChoices(3), "core")
JaxEngine(header).request("a", [1, 2, 3], None)
config = to_config(header)
batch = Batch().add(Code.LOOKUP, 0).build()
state, results = cache.run(*cache.init(config, cache.buckets_for(config)), batch, only=(Code.LOOKUP,))
print(int(results.table[0, 0]), any(name.startswith("reference.") for name in sys.modules))
"""


def test_it_works_without_the_reference() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["4", "False"], done.stderr


def test_a_larger_state_says_the_same() -> None:
    """`tests/slow/test_cache.py` goes on with one."""
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


# Sizes of arrays are rounded up so that few programs serve many, and large arrays not by much.


@pytest.mark.parametrize(
    ("size", "least", "found"),
    [
        *((1, 256, 256), (257, 256, 1024), (1025, 256, 4096)),
        *((262_145, 256, 1 << 19), (1 << 19, 256, 1 << 19), ((1 << 19) + 1, 256, 1 << 20)),
        *(((1 << 20) + 1, 1024, 1 << 21), (6_000_000, 1024, 6 << 20), (9_000_000, 1024, 5 << 21)),
        *((5, 1 << 20, 1 << 20), (2_000_000, 1 << 20, 1 << 21), (5, 1 << 23, 1 << 23)),  # never below what was there
    ],
)
def test_bucket(size, least, found):
    assert bucket(size, least) == found


@pytest.mark.parametrize(("size", "least", "found"), [(1, 8, 8), (1025, 8, 1032), (32_770, 512, 33_280)])
def test_nearest(size, least, found):
    assert nearest(size, least) == found


def test_every_entry_fits_its_word():
    """Four times an entry plus one, and two bits, is a positive int32."""
    sizes = {"blocks": 256, "requests": 8, "groups": 8, "row": 64, "chain": 64}
    most = Buckets(**sizes, keys=ENTRIES // 8 - 2)
    assert (most.keys + 1) * most.groups * 4 + 3 < 1 << 31
    with pytest.raises(ConfigError, match="keys"):
        Buckets(**sizes, keys=ENTRIES // 8 - 1)

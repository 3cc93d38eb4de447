"""Promises of a compiled program besides its answers: few compilations, no transfers, lanes, no reference."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.dialects.vllm.rules.parameters import of_config
from hkv.dialects.vllm.traffic.traffic import FEATURES, draw_header
from hkv.spec import FullAttention, Mamba
from hkv.testing.choices import RandomChoices
from tests.cache.build import BUCKETS, config, operations, program, prompt, run, start

DRAFTING = config(
    FullAttention(block_size=8),
    Mamba(block_size=8, num_speculative_blocks=1, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4),
    num_blocks=40,
    partial_hits=True,
)
"""Sub-block hits, and states for drafts and inside chunks."""


def test_a_thousand_configurations_share_a_handful_of_sizes() -> None:
    found = set()
    for seed in range(1000):
        choices = RandomChoices(seed)
        settings = to_config(draw_header(choices, FEATURES[seed % len(FEATURES)], 1 + seed % 2))
        buckets = cache.buckets_for(settings)
        of_config(settings, buckets.groups)
        found.add(buckets)
    assert len(found) <= 4


def test_configurations_with_the_same_sizes_share_a_program() -> None:
    cache.forget_programs()
    for seed in range(60):
        engine = JaxEngine(draw_header(RandomChoices(seed), FEATURES[seed % len(FEATURES)]))
        engine.request("a", list(range(9)), None)
        engine.lookup("a")
    assert cache.count_programs() <= 2


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


def test_lanes_do_what_single_states_do() -> None:
    configs = [DRAFTING, config(num_blocks=9), config(num_blocks=256, caching=False)]
    states = [cache.init(each, BUCKETS) for each in configs]
    batches = []
    for n in (9, 11, 6):
        batch = prompt(Batch(), 0, range(n), tokens=4 * n + 2).add(Code.FREE, 0)
        batches.append(operations(prompt(prompt(batch.add(Code.DROP, 0), 1, range(n)), 2, range(3, n), must_fit=1)))
    arguments = [(parameters, state, each) for (parameters, state), each in zip(states, batches, strict=True)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *arguments)
    together = program(3)(*stacked)
    for lane, each in enumerate(arguments):
        state, results = program()(*each)
        for got, want in zip(jax.tree.leaves(together[1]), jax.tree.leaves(results), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[lane], np.asarray(want))
        for got, want in zip(jax.tree.leaves(together[0]), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[lane][:-1], np.asarray(want)[:-1])  # the last is spare


def test_states_are_small_pytrees() -> None:
    assert len(jax.tree.leaves(start()[1])) <= 9


SCRIPT = """
import sys
sys.modules["reference"] = None
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.spec import FullAttention, Mamba
from hkv.testing.choices import RandomChoices
from hkv.dialects.vllm.traffic.headers import draw_header
header = draw_header(RandomChoices(3), "core")
JaxEngine(header).request("a", [1, 2, 3], None)
config = to_config(header)
state, results = cache.lookup(*cache.init(config, cache.buckets_for(config)), 0)
print(int(results.table[0, 0]), any(name.startswith("reference.") for name in sys.modules))
"""


def test_it_works_without_the_reference() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["4", "False"], done.stderr

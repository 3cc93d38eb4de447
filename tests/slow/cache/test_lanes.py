"""States stacked as lanes of one program: each does what it does alone."""

from __future__ import annotations

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.spec import FullAttention, Mamba
from tests.cache.build import BUCKETS, config, operations, program, prompt

DRAFTING = config(
    FullAttention(block_size=8),
    Mamba(block_size=8, num_speculative_blocks=1, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4),
    num_blocks=40,
    partial_hits=True,
)
"""Sub-block hits, and states for drafts and inside chunks."""


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

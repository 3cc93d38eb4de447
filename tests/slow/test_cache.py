"""The compiled cache: with more slots than at first, as lanes of one program, and with a program for one verb."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.engines import jax_batches
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.dialects.vllm.traffic.traffic import draw_header
from hkv.spec import FullAttention, Mamba
from tests.cache.build import BUCKETS, config, operations, program, prompt
from tests.cache.test_lockstep import lockstep


def test_more_requests_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 35 at a time."""
    sizes = []
    resize = jax_batches.Dispatcher._resize
    monkeypatch.setattr(
        jax_batches.Dispatcher, "_resize", lambda self, new: sizes.append(new.requests) or resize(self, new)
    )
    choices = RandomChoices(2002)
    lockstep(draw_header(choices, "external", 2), choices)
    assert sizes == [4 * jax_batches.SLOTS]


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

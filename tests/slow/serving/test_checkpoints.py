"""States that chunks leave behind inside them, served: no chunk ends for them, and every token is the model's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hkv
from hkv import serving
from hkv.errors import ConfigError, OperationError
from hkv.tier.tier import MemoryTier
from tests.cache.build import large_copies
from tests.serving import test_serving
from tests.serving.test_serving import BUDGET, LONGEST, VOCABULARY, Host, R, check, hidden, serve
from tests.slow.serving import test_inside

PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, size).tolist() for n, size in ((1, 11), (2, 21), (3, 9))]


def config(unit: int, checkpoints: int = 1):
    """The layers of the tests beside, whose recurrent one keeps states inside chunks."""
    made = test_inside.config() if unit == 2 else test_serving.config(60)
    groups = [
        dataclasses.replace(
            group,
            spec=dataclasses.replace(
                group.spec, num_prefill_checkpoint_blocks=checkpoints, prefill_checkpoint_alignment=1
            ),
        )
        if group.spec.snapshot
        else group
        for group in made.topology.groups
    ]
    match = unit if made.partial_hits else None
    return hkv.cache_config(hkv.Topology(groups=tuple(groups)), 60, max_model_len=LONGEST, prefix_match_unit=match)


@pytest.mark.parametrize("unit", [2, 4])
def test_tokens_are_those_without_a_cache_through_states_inside_chunks(unit):
    """Prompts come again after, and while, the request that computed them goes on; hits end after so many tokens."""
    host = Host(config(unit))
    for prompt in PROMPTS:
        hit = (len(prompt) - 1) // unit * unit
        assert host.arrive(0, prompt, len(prompt) + 1) == 0
        host.run()
        assert host.arrive(1, prompt, len(prompt) + 5) == hit
        found = serving.gather(host.served, "state", 1)["state0"][-(-hit // host.served.cache.block_sizes[-1]) - 1, 0]
        np.testing.assert_allclose(found, hidden(prompt[:hit])[1], atol=1e-5)
        host.targets[0] += 6
        host.run()
        assert host.arrive(2, prompt, len(prompt) + 7) == hit
        host.run()
        for row in range(R):
            check(host.tokens(row), len(prompt))
            host.leave(row)


@pytest.mark.parametrize("unit", [2, 4])
def test_a_prompts_last_chunk_goes_on_behind_its_last_state(unit):
    """9 tokens, all of them in the first chunk; without such states it ends after 8."""
    for checkpoints, count in ((1, 9), (0, 8)):
        host = Host(config(unit, checkpoints))
        host.arrive(0, PROMPTS[2], 10)
        plan = serving.schedule(host.served, host.history, host.known, host.arrived, budget=BUDGET)
        assert plan.counts.tolist() == [count, 0, 0]


def test_states_are_written_in_place():
    host = Host(config(unit=4), debug=False)
    lowered = serve.lower(host.served, host.history, host.known, host.arrived, host.targets)
    copied = large_copies(lowered.compile().as_text(), host.served.pool.size)
    assert [line for line in copied if " scatter(" not in line] == []


def test_states_that_nobody_would_write_are_refused():
    host = Host(config(unit=4))
    host.arrive(0, PROMPTS[2], 10)
    with pytest.raises(ConfigError, match="num_prefill_checkpoint_blocks = 1"):
        serving.store(host.served, serving.Offload(MemoryTier(1 << 20), "model"), 0, PROMPTS[2])
    tokens = np.array([*PROMPTS[2], 0, 0, 0])
    served, turn = serving.step(host.served, tokens, np.array([0, 9]), np.array([0]))
    assert serving.checkpoint_tokens(served, "state", turn).tolist() == [8]
    with pytest.raises(OperationError, match="checkpoints = None"):
        serving.carry_states(served, "state", turn)

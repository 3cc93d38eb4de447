"""The result of a step says which of a row's tokens others find: of a state that no chunk ended at, none."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import hkv
from hkv.cache.cache import Cache

LONGEST, SEEDS = 48, 8


def made(block: int = 8, **options) -> Cache:
    inside = options.pop("inside", False)
    full = hkv.FullAttention(block_size=8 if options.get("prefix_match_unit") else 4)
    drafts = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if inside else {}
    topology = hkv.Topology.of_specs([full, hkv.Mamba(block_size=block, **drafts)])
    return hkv.init(hkv.cache_config(topology, 60, max_model_len=64, **options), rows=1, row_blocks=24)


def computed(cache: Cache, prompt: np.ndarray, chunks: list[int]) -> tuple[Cache, np.ndarray]:
    """The cache after the prompt in chunks, each cut to what is allowed, and all that steps registered, [steps, G]."""
    cache, _ = hkv.arrive(cache, np.array([0]), prompt[None], np.array([len(prompt)]))
    done, told = 0, []
    for chunk in [*chunks, *[LONGEST] * 8]:
        count = min(chunk, len(prompt) - done, int(cache.allowed[0]))
        tokens = np.zeros(LONGEST, np.int32)
        tokens[:count] = prompt[done : done + count]
        cache, result = hkv.step(cache, tokens, np.array([0, count]))
        assert result.status[0] == hkv.Status.OK
        told.append(np.asarray(result.registered[0]))
        done += count
    assert done == len(prompt)
    return cache, np.array(told)


def test_one_chunk_that_ends_inside_a_states_block_says_that_nothing_is_found():
    cache, told = computed(made(16), np.arange(47, dtype=np.int32), [47])
    assert told.max(axis=0).tolist() == [32, 0]
    assert hkv.longest_hit(cache, jnp.arange(47)).length == 0
    cache, told = computed(made(16), np.arange(47, dtype=np.int32), [32, 15])
    assert told.max(axis=0).tolist() == [32, 32]
    assert hkv.longest_hit(cache, jnp.arange(47)).length == 32


@pytest.mark.parametrize(
    "options", [{}, {"retention_interval": 0}, {"inside": True}, {"prefix_match_unit": 4}], ids=str
)
def test_a_prompt_is_found_up_to_the_last_state_that_its_steps_registered(options):
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(SEEDS):
        prompt = draw.integers(0, 9, draw.integers(9, LONGEST)).astype(np.int32)
        chunks = draw.choice([3, 8, 13, 16, LONGEST], draw.integers(1, 4)).tolist()
        cache, told = computed(made(**dict(options)), prompt, chunks)
        again = np.append(prompt, np.int32(10))
        text = jnp.asarray(np.pad(again, (0, LONGEST + 1 - len(again))))
        hit = int(hkv.longest_hit(cache, text, len(again)).length)
        most = told[:, 0].max()
        assert hit == max([int(end) for end in told[:, 1] if end <= most], default=0)
        hits += hit > 0
    assert hits

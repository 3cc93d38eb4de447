"""Checkpoints served through HKV's cache say what `transformers` said without one: tokens, and every logit."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from examples.serve.checkpoint import read_weights
from examples.serve.configs import CONFIGS
from examples.serve.record import record
from examples.serve.tutorial import generate
from hkv import serving
from hkv.serving.objects import chunk_objects
from hkv.tier.tier import MemoryTier
from tests.slow.examples.served_checkpoints import CHECKPOINTS, engine, expected, served

MODELS = sorted(CONFIGS)
SMALL = {
    "deepseek_v3": (24, "BLNHC"),
    "gemma3": (72, "BLHNC"),
    "gpt_oss": (40, "LBHNC"),
    "jamba": (16, None),
    "llama": (24, "BLHNC"),
    "llama4": (40, "LBHNC"),
    "qwen3_next": (16, None),
}
"""Blocks of a pool that holds one request and a half, and an order of its axes."""


@pytest.mark.parametrize("model", MODELS)
def test_what_comes_again_is_found_and_says_the_same(model):
    """Prompts that share beginnings, one after the other, the first one twice; then more requests than rows at once."""
    sizes = np.random.default_rng(3)
    made = engine(model, rows=3, budget=13, limit=lambda: int(sizes.integers(1, 9)))
    hits = [served(made, model, [prompt])[0].hits for prompt in (0, 1, 2, 3, 0)]
    lengths, _, _ = expected(model)
    unit = made.plan.config().scheduler_block_size
    assert hits == [[0], [24 // unit * unit], [32], [0], [(lengths[0] - 1) // unit * unit]]
    served(made, model, (0, 1, 2, 3, 1, 0))
    moved = jnp.roll(made.served.pool, made.served.layers[0].layout.page_size // 4)
    made.served = dataclasses.replace(made.served, pool=moved)
    with pytest.raises(AssertionError):  # what was found is read
        served(made, model, [0])


@pytest.mark.parametrize("model", sorted(SMALL))
def test_the_same_is_said_where_blocks_run_out(model):
    """In a pool that holds one request and a half: preemptions, blocks evicted, prompts computed again.

    Before every step, NaN is written to all blocks without references that cannot be found.
    """
    blocks, layout = SMALL[model]
    made = engine(model, blocks=blocks, rows=4, budget=7, layout=layout, limit=lambda: spoil_free_blocks(made) or 7)
    requests = served(made, model, (0, 1, 2, 3, 0, 2))
    assert made.preempted > 0
    assert int(made.served.cache.evictions) > 0
    assert any(len(request.hits) > 1 for request in requests)


def spoil_free_blocks(made):
    pool = np.array(made.served.pool).view(np.uint8)
    references = np.asarray(made.served.cache.state.refs)[: made.plan.num_blocks]
    for layer in made.served.layers:
        layout = layer.layout
        for block in np.flatnonzero(references == 0)[1:]:  # the null block is never written
            start = layout.offset + layer.index * layout.strides[0] + int(block) * layout.strides[1]
            pool[start : start + layout.page_size] = 255
    made.served = dataclasses.replace(made.served, pool=jnp.asarray(pool.view(np.uint32)))


@pytest.mark.parametrize("model", ["gemma3", "qwen3_next"])
def test_drafts_change_nothing_that_is_said(model):
    """Drafts that the model would say, and drafts of which every third token is another one."""
    lengths, texts, _ = expected(model)
    wrong = itertools.cycle((False, False, True))

    def draft(tokens):
        text = next(text for text in texts if text[: len(tokens)] == tokens)
        return [abs(token - next(wrong)) for token in text[len(tokens) : len(tokens) + 3]]

    made = engine(model, rows=3, budget=16, draft=draft)
    first = served(made, model, (0, 1, 2, 3, 1, 0))
    assert sum(request.accepted for request in first) > 20
    assert sum(request.rejected for request in first) > 20
    assert served(made, model, [0])[0].hits[0] > lengths[0] // 2


@pytest.mark.parametrize("model", ["jamba", "qwen3_next"])
def test_hits_inside_blocks_change_nothing_that_is_said(model):
    """Of a prompt that comes again all but the last token is found, wherever it ends in the blocks of states."""
    made = engine(model, rows=3, budget=13, match_unit=2)
    lengths, _, _ = expected(model)
    last = [(length - 1) // 2 * 2 for length in lengths]
    assert all(end % made.plan.config().scheduler_block_size for end in (last[0], last[2]))
    assert [served(made, model, [prompt])[0].hits for prompt in (0, 0, 2, 2)] == [[0], [last[0]], [32], [last[2]]]
    again = served(made, model, (0, 1, 2, 3, 2, 0))
    assert [again[prompt].hits for prompt in (0, 2, 4, 5)] == [[last[prompt]] for prompt in (0, 2, 2, 0)]


@pytest.mark.parametrize(("model", "chunk"), [("gemma3", 8), ("qwen3_next", None)])
def test_an_engine_goes_on_from_what_another_has_computed(model, chunk):
    """Objects of keys and values, windows and states; the second engine's pages lie in another order."""
    places = serving.Offload(MemoryTier(1 << 26), model, chunk)
    served(engine(model, rows=3, budget=13, offload=places), model, (0, 1, 2, 3))
    again = served(engine(model, rows=3, budget=13, offload=places, layout=SMALL[model][1]), model, (0, 1, 2, 3))
    lengths, _, _ = expected(model)
    unit = chunk or chunk_objects(engine(model).served).chunk
    assert [request.hits for request in again] == [[(lengths[prompt] - 1) // unit * unit] for prompt in range(4)]


def test_the_tutorial_goes_from_a_folder_to_tokens_with_a_hit():
    lengths, texts, _ = expected("qwen3_next")
    prompts = [texts[prompt][: lengths[prompt]] for prompt in (0, 2)]
    first, second = generate(CHECKPOINTS / "qwen3_next", prompts, new=9)
    assert first == (0, texts[0][lengths[0] :][:9])
    assert second == (32, texts[2][lengths[2] :][:9])


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
def test_what_is_recorded_is_what_transformers_computes(model, tmp_path):
    """The recording made anew, in an environment that has `transformers`: the same weights, text and logits."""
    pytest.importorskip("transformers")
    record(tmp_path / model, CONFIGS[model])
    for name, kept in read_weights(CHECKPOINTS / model).items():
        np.testing.assert_array_equal(read_weights(tmp_path / model)[name], kept)
    with np.load(tmp_path / model / "expected.npz") as new, np.load(CHECKPOINTS / model / "expected.npz") as kept:
        for name in ("prompts", "tokens"):
            np.testing.assert_array_equal(new[name], kept[name])
        np.testing.assert_allclose(new["logits"], kept["logits"], rtol=1e-4, atol=1e-4)

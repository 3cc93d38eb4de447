"""Checkpoints served through HKV's cache say what `transformers` said without one: tokens, and every logit."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest

from examples.serve.checkpoint import read_weights
from examples.serve.engine import Engine, Request
from examples.serve.record import CONFIGS, record

CHECKPOINTS = pathlib.Path(__file__).resolve().parents[2] / "data" / "serve"
FAMILIES = sorted(path.name for path in CHECKPOINTS.iterdir())
NEW = 20
SMALL = {"gemma3": 72, "gpt_oss": 40, "llama": 24}
"""Blocks of a pool that holds one request and a half."""


@functools.cache
def expected(family):
    """Prompts, and for each the whole text and its logits, as `python -m examples.serve.record` wrote them."""
    with np.load(CHECKPOINTS / family / "expected.npz") as found:
        texts = [row[: length + NEW].tolist() for row, length in zip(found["tokens"], found["prompts"], strict=True)]
        return found["prompts"].tolist(), texts, found["logits"]


def engine(family, blocks=400, **options):
    """An engine whose cache has so many blocks of four tokens."""
    return Engine(CHECKPOINTS / family, blocks * block_bytes(family), longest=64, block_size=4, **options)


@functools.cache
def block_bytes(family):
    made = Engine(CHECKPOINTS / family, 1 << 22, longest=64, block_size=4)
    return made.plan.served.plan.workers[0].bytes_per_block


def served(made, family, prompts):
    lengths, texts, logits = expected(family)
    requests = [Request(texts[prompt][: lengths[prompt]], NEW) for prompt in prompts]
    made.serve(requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == texts[prompt], prompt
        computed = sorted(request.logits)
        assert computed[-1] == len(texts[prompt]) - 2
        assert set(range(request.hits[-1], computed[-1] + 1)) <= set(computed)
        for position in computed:
            np.testing.assert_allclose(request.logits[position], logits[prompt, position], rtol=1e-4, atol=1e-4)
    return requests


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_comes_again_is_found_and_says_the_same(family):
    """One after the other, prompts that share beginnings, the first one twice."""
    made = engine(family)
    hits = [served(made, family, [prompt])[0].hits for prompt in (0, 1, 2, 3, 0)]
    lengths, _, _ = expected(family)
    assert hits == [[0], [24], [32], [0], [(lengths[0] - 1) // 4 * 4]]


@pytest.mark.parametrize("budget", [5, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_share_steps(family, budget):
    """Chunks of prefill and decodes in one step, more requests than rows."""
    served(engine(family, rows=3, budget=budget), family, (0, 1, 2, 3, 1, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_is_said_where_blocks_run_out(family):
    """In a pool that holds one request and a half: preemptions, blocks evicted, prompts computed again."""
    small = engine(family, blocks=SMALL[family], rows=4, budget=7)
    requests = served(small, family, (0, 1, 2, 3, 0, 2))
    assert small.preempted > 0
    assert int(small.served.cache.evictions) > 0
    assert any(len(request.hits) > 1 for request in requests)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_recorded_is_what_transformers_computes(family, tmp_path):
    """The recording made anew, in an environment that has `transformers`: the same weights, text and logits."""
    pytest.importorskip("transformers")
    record(tmp_path / family, CONFIGS[family])
    for name, kept in read_weights(CHECKPOINTS / family).items():
        np.testing.assert_array_equal(read_weights(tmp_path / family)[name], kept)
    with np.load(tmp_path / family / "expected.npz") as new, np.load(CHECKPOINTS / family / "expected.npz") as kept:
        for name in ("prompts", "tokens"):
            np.testing.assert_array_equal(new[name], kept[name])
        np.testing.assert_allclose(new["logits"], kept["logits"], rtol=1e-4, atol=1e-4)

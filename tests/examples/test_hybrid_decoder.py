"""A decoder with a hybrid cache inside `jit` computes what it computes without a cache."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from hkv.step_state import StepCounter

PATH = pathlib.Path(__file__).resolve().parent.parent.parent / "examples" / "hybrid_decoder.py"
ROWS, STEPS, BLOCKS = 2, 26, 48
POISON = np.float32(1e9).view(np.uint32)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("hybrid_decoder", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decoder(example):
    made = example.Decoder(example.Model(pairs=1, longest=48), ROWS, BLOCKS)
    made.pool = jnp.full(made.pool.shape, POISON)
    return made


@pytest.fixture(scope="module")
def rounds(example, decoder):
    """Three rounds of requests: new ones, ones that begin like those, and the first ones again."""
    draw = np.random.default_rng(1)
    first = [draw.integers(0, 64, length).tolist() for length in (9, 18)]
    found = [decoder.generate(first, STEPS)]
    second = [[*sequence[:-9], 1, 2, 3][:20] for sequence in found[0][0]]
    found.append(decoder.generate(second, STEPS))
    found.append(decoder.generate(first, STEPS))
    return found


def test_logits_are_those_of_the_pass_without_a_cache(example, decoder, rounds):
    for sequences, logits, hits in rounds:
        assert example.largest_error(decoder, sequences, logits, hits) < 5e-5
        assert all(len(sequence) > 3 * decoder.model.window for sequence in sequences)


def test_a_wrong_page_would_be_seen(example, decoder, rounds):
    sequences, logits, hits = rounds[0]
    changed = [sequences[0], [*sequences[1][:3], sequences[1][3] ^ 1, *sequences[1][4:]]]
    assert example.largest_error(decoder, changed, logits, hits) > 1e-2


def test_prefixes_are_found_and_blocks_were_evicted(decoder, rounds):
    assert rounds[0][2] == [0, 0]
    assert all(hit >= 16 for hit in rounds[1][2])
    assert int(decoder.state.counters[StepCounter.EVICTIONS]) > 0


def test_the_same_prompt_gives_the_same_tokens_whatever_was_cached(rounds):
    assert rounds[2][0] == rounds[0][0]


def test_sliding_window_layers_hold_less(decoder, rounds):
    assert decoder.held[1] <= ROWS * 4
    assert decoder.held[0] == sum(-(-(len(sequence) - 1) // 4) for sequence in rounds[2][0])


def test_the_decode_loop_copies_no_pool_and_calls_no_host(decoder, rounds):
    last, ones = np.zeros(ROWS, np.int32), np.ones(ROWS, np.int32)
    lowered = decoder.decode.lower(decoder.weights, decoder.state, decoder.pool, last, ones, steps=STEPS)
    text = lowered.compile().as_text()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    assert str(decoder.pool.size) not in shapes
    assert "callback" not in text

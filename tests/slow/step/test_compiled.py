"""Compiled form of a step: nothing of the pool's size is copied, nothing calls the host, no loop is over rows."""

from __future__ import annotations

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hkv.cache import step as serving
from hkv.keys.fingerprint import ROOT
from tests.reference.build import config as build
from tests.step.compiled_step import BLOCKS, ROWS, WIDTH, batch, copies, made


@functools.cache
def compiled(tokens: int, form: str):
    config, parameters, state = made()
    room = serving.room_for(config, queries=ROWS, tokens=ROWS * tokens)
    if form == "shared":
        lowered = serving.jitted(room).lower(parameters, state, batch(tokens))
        return lowered.as_text(), lowered.compile().as_text()
    if form == "specialised":
        lowered = serving.specialised(parameters, room).trace(state, batch(tokens)).lower()
        return lowered.as_text(), lowered.compile().as_text()

    def run(parameters, state, new):
        def body(state, _):
            state, result = serving.step(parameters, state, new, room=room)
            return state, result.status

        return lax.scan(body, state, length=50)

    lowered = jax.jit(run, donate_argnums=1).lower(parameters, state, batch(tokens))
    return lowered.as_text(), lowered.compile().as_text()


FORMS = [(1, "shared"), (1, "scanned"), (5, "shared"), (5, "specialised")]


@pytest.mark.parametrize(("tokens", "form"), FORMS)
def test_no_large_array_is_copied_and_the_host_is_not_called(tokens, form):
    _, text = compiled(tokens, form)
    assert copies(text) == []
    assert "callback" not in text
    assert not re.search(r"\b(infeed|outfeed|send|recv)\(", text)


def test_the_search_for_copies_finds_one():
    _, _, state = made()
    text = jax.jit(lambda refs: (refs, refs.at[0].set(1))).lower(state.refs).compile().as_text()
    assert copies(text)


def test_the_only_loops_are_over_refusals_and_inside_hash_blocks_and_over_their_links():
    for tokens, form in FORMS[::2]:
        assert compiled(tokens, form)[0].count("stablehlo.while") == 3


def test_a_program_of_one_configuration_answers_alike_and_uses_donated_arrays_again():
    config, parameters, state = made()
    room = serving.room_for(config, queries=ROWS, tokens=ROWS)
    shared, step = serving.jitted(room), serving.specialised(parameters, room)
    state, _ = serving.start(state, np.arange(ROWS, dtype=np.int32), np.tile(np.uint32(ROOT), (ROWS, 1)))
    beside = jax.tree.map(jnp.array, state)
    before = None
    for _ in range(20):
        state, result = step(state, batch(1))
        beside, expected = shared(parameters, beside, batch(1))
        chex.assert_trees_all_equal(result, expected)
        pointers = sorted(array.unsafe_buffer_pointer() for array in vars(state).values())
        assert before in (None, pointers)
        before = pointers
    chex.assert_trees_all_equal(state, beside)


def test_configurations_of_the_same_shape_share_one_executable():
    traces = []

    def counted(parameters, state, new):
        traces.append(1)
        return serving.step(parameters, state, new, room=24)

    step = jax.jit(chex.assert_max_traces(counted, n=1))
    for groups in ("full:16,swa:16:64,mamba:32", "swa:32:7,chunked:32:64,full:32", "full:16,opaque:16,swa:48:5"):
        config = build(groups, num_blocks=BLOCKS, max_model_len=960)
        parameters, state = serving.init(config, rows=ROWS, row=WIDTH)
        chains = np.zeros((ROWS, 192, 4), np.uint32)
        state = type(state)(**{**vars(state), "chains": chains})
        step(parameters, state, batch(1))
    assert len(traces) == 1

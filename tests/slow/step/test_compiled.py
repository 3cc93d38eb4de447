"""Compiled form of a step: nothing of the pool's size is copied, nothing calls the host, no loop is over rows.

Hits inside blocks and states inside chunks keep to it, and configurations that have neither trace nothing of them.
"""

from __future__ import annotations

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hkv.cache import arrivals, inside_hits, registration, tails
from hkv.cache import copies as block_copies
from hkv.cache import step as serving
from hkv.keys.fingerprint import ROOT
from hkv.spec import FullAttention, Mamba
from tests.reference.build import config as build
from tests.step import compiled_step
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


LARGE_INSIDE = {str(BLOCKS), str(2 * BLOCKS), "8192", "65536", f"{ROWS},2,{WIDTH}", f"{ROWS},192"}


def made_inside(checkpoints: int = 0, **fields):
    state = Mamba(block_size=32, num_prefill_checkpoint_blocks=checkpoints, prefill_checkpoint_alignment=1)
    groups = [FullAttention(block_size=16), state]
    config = build(groups, num_blocks=BLOCKS, max_model_len=4096, hash_block_size=8, **fields)
    return config, *serving.init(config, rows=ROWS, row=WIDTH)


@pytest.mark.parametrize(("partial_hits", "checkpoints"), [(True, 0), (False, 1), (True, 1)])
def test_with_hits_or_states_inside_no_large_array_is_copied(partial_hits, checkpoints, monkeypatch):
    config, parameters, state = made_inside(checkpoints, partial_hits=partial_hits)
    if partial_hits:
        assert state.keys.shape == (2 * BLOCKS, 8)
        assert state.index.shape == (65536,)
    room = serving.room_for(config, queries=ROWS, tokens=5 * ROWS)
    text = serving.jitted(room).lower(parameters, state, batch(5)).compile().as_text()
    monkeypatch.setattr(compiled_step, "LARGE", LARGE_INSIDE)
    assert copies(text) == []
    assert "custom-call" not in text
    assert "callback" not in text


@pytest.mark.parametrize("function", ["step", "arrive"])
def test_configurations_without_them_trace_nothing_of_it(function, monkeypatch):
    """No part of it is as much as called while another configuration's programs are made_inside."""

    def fail(*_args, **_kwargs):
        raise AssertionError("traced for a configuration whose hits end with blocks")

    for module, names in {
        block_copies: ("take", "give_back", "numbered"),
        tails: ("due", "entries", "unknown", "order_of", "written"),
        inside_hits: ("longest",),
        arrivals: ("_look_up_inside",),
        registration: ("numbered",),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, fail)
    trace(function, partial_hits=False)
    with pytest.raises(AssertionError, match="hits end with blocks"):
        trace(function, partial_hits=True)


@pytest.mark.parametrize("function", ["step", "arrive"])
def test_configurations_without_states_inside_chunks_trace_nothing_of_them(function, monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("traced for a configuration whose chunks leave states only where they end")

    for name in ("plan", "noted", "export_units", "looked_at", "answer"):
        monkeypatch.setattr(registration, name, fail)
    trace(function, partial_hits=False)
    trace(function, partial_hits=True)
    if function == "step":
        with pytest.raises(AssertionError, match="only where they end"):
            trace(function, partial_hits=False, checkpoints=1)


def trace(function: str, partial_hits: bool, checkpoints: int = 0) -> None:
    config, parameters, state = made_inside(checkpoints, partial_hits=partial_hits)
    if function == "step":
        room = serving.room_for(config, queries=ROWS, tokens=ROWS)
        jax.make_jaxpr(functools.partial(serving.step, room=room))(parameters, state, batch(1))
    else:
        rows, counts = np.arange(2, dtype=np.int32), np.full(2, 9, np.int32)
        new = arrivals.Arrivals(rows, np.zeros((2, 4), np.uint32), np.zeros((2, 64), np.int32), counts)
        jax.make_jaxpr(arrivals.arrive)(parameters, state, new)

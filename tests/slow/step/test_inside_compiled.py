"""Compiled steps with hits inside blocks, or states inside chunks: as others, which have nothing of it."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from hkv.cache import arrivals, copies, inside_hits, registration, tails
from hkv.cache import step as serving
from hkv.spec import FullAttention, Mamba
from tests.reference.build import config as build
from tests.step import compiled_step
from tests.step.compiled_step import BLOCKS, ROWS, WIDTH, batch

LARGE = {str(BLOCKS), str(2 * BLOCKS), "8192", "65536", f"{ROWS},2,{WIDTH}", f"{ROWS},192"}


def made(checkpoints: int = 0, **fields):
    state = Mamba(block_size=32, num_prefill_checkpoint_blocks=checkpoints, prefill_checkpoint_alignment=1)
    groups = [FullAttention(block_size=16), state]
    config = build(groups, num_blocks=BLOCKS, max_model_len=4096, hash_block_size=8, **fields)
    return config, *serving.init(config, rows=ROWS, row=WIDTH)


@pytest.mark.parametrize(("partial_hits", "checkpoints"), [(True, 0), (False, 1), (True, 1)])
def test_no_large_array_is_copied_and_the_host_is_not_called(partial_hits, checkpoints, monkeypatch):
    config, parameters, state = made(checkpoints, partial_hits=partial_hits)
    if partial_hits:
        assert state.keys.shape == (2 * BLOCKS, 8)
        assert state.index.shape == (65536,)
    room = serving.room_for(config, queries=ROWS, tokens=5 * ROWS)
    text = serving.jitted(room).lower(parameters, state, batch(5)).compile().as_text()
    monkeypatch.setattr(compiled_step, "LARGE", LARGE)
    assert compiled_step.copies(text) == []
    assert "custom-call" not in text
    assert "callback" not in text


@pytest.mark.parametrize("function", ["step", "arrive"])
def test_configurations_without_them_trace_nothing_of_it(function, monkeypatch):
    """No part of it is as much as called while another configuration's programs are made."""

    def fail(*_args, **_kwargs):
        raise AssertionError("traced for a configuration whose hits end with blocks")

    for module, names in {
        copies: ("take", "give_back", "numbered"),
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
    config, parameters, state = made(checkpoints, partial_hits=partial_hits)
    if function == "step":
        room = serving.room_for(config, queries=ROWS, tokens=ROWS)
        jax.make_jaxpr(functools.partial(serving.step, room=room))(parameters, state, batch(1))
    else:
        rows, counts = np.arange(2, dtype=np.int32), np.full(2, 9, np.int32)
        new = arrivals.Arrivals(rows, np.zeros((2, 4), np.uint32), np.zeros((2, 64), np.int32), counts)
        jax.make_jaxpr(arrivals.arrive)(parameters, state, new)

"""No chunking, however hostile, makes a row read a state or a token that is not its own: a model in pages is the judge.

`tests.step.paged_model` says what the model is, `tests.step.hostile_chunks` what happens to it.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hkv
from hkv.state.status import Status
from tests.slow.step.test_checkpoints import states
from tests.step.hostile_chunks import drive
from tests.step.paged_model import BLOCKS, Served

SPECS = {
    "mamba": lambda size: hkv.Mamba(block_size=size),
    "full": lambda size: hkv.FullAttention(block_size=size),
    "window": lambda size: hkv.SlidingWindow(block_size=size, window=5),
    "opaque": lambda size: hkv.OpaqueState(block_size=size),
}


def config_of(specs, **options) -> hkv.VllmConfig:
    """Blocks enough for some rows, not for all."""
    return hkv.cache_config(hkv.Topology.of_specs(specs), BLOCKS, max_model_len=48, **options)


@st.composite
def configs(draw):
    """A recurrent group and two others, all sizes of arrays the same; chunks leave its states behind, or do not."""
    size = draw(st.sampled_from((2, 2, 8)))
    kinds = draw(st.lists(st.sampled_from(sorted(SPECS)), min_size=2, max_size=2))
    recurrent = SPECS["mamba"](size) if size == 8 else states(size, draw(st.sampled_from((1, 1, 4))), scratch=2)
    interval = draw(st.sampled_from((None, 0, 2 * size)))
    return config_of([recurrent, *(SPECS[kind](size) for kind in kinds)], retention_interval=interval)


@st.composite
def inside_configs(draw):
    """The same in blocks of four hash blocks, inside which hits may end, but for a window's."""
    kind = draw(st.sampled_from(("full", "mamba", "opaque", *["window"] * 4)))
    specs = [SPECS["mamba"](8), SPECS["full"](8), SPECS[kind](2 if kind == "window" else 8)]
    if kind == "window":
        specs[0] = states(8, draw(st.sampled_from((1, 2, 4))))
    return config_of(specs, prefix_match_unit=2, retention_interval=draw(st.sampled_from((None, 0, 16))))


@settings(max_examples=40)
@given(config=configs(), data=st.data())
def test_hostile_chunks_never_resume_from_another_state(config, data):
    drive(config, data, alone=config.block_sizes[0] == 2)


@settings(max_examples=40)
@given(config=inside_configs(), data=st.data())
def test_hostile_chunks_never_resume_inside_a_block_from_another_state(config, data):
    """Rows wait with hits inside blocks while those whose states they are go on, are refused, and end."""
    drive(config, data)


def test_a_chunk_that_begins_inside_a_state_block_ends_with_it():
    """Chunks of 6 tokens, a state every 8: what was registered for 8 was the state at 6."""
    served = Served(config_of([SPECS["mamba"](8)] * 3))
    prompt = list(range(16))
    served.arrive(0, prompt)
    assert served.step([prompt[:6], [], []])[0] == Status.OK
    assert served.cache.allowed[0] == 2
    assert served.step([prompt[6:12], [], []])[0] == Status.CROSSES_STATE
    assert served.step([prompt[6:8], [], []])[0] == Status.OK
    assert served.step([prompt[8:14], [], []])[0] == Status.OK
    assert served.arrive(1, prompt) == 8
    assert served.step([[], prompt[8:14], []])[1] == Status.OK


def alignments(draw) -> int:
    """Tokens of which the distance of a state from its chunk's beginning is a multiple."""
    return draw(st.sampled_from((1, 1, 2, 4)))


def intervals(draw, size: int) -> int | None:
    """Every retention, where lengths are multiples of `size` tokens."""
    return draw(st.sampled_from((None, 0, size, 2 * size)))


def two_groups(draw) -> hkv.VllmConfig:
    """Two recurrent groups that leave states behind, of which only one may."""
    kind = draw(st.sampled_from(sorted(SPECS)))
    specs = [states(2, alignments(draw)), states(2, alignments(draw)), SPECS[kind](2)]
    return config_of(specs, retention_interval=intervals(draw, 2))


def several_sizes(draw) -> hkv.VllmConfig:
    """States that stand off the ends of their own blocks: hits end with those of other groups."""
    specs = [states(2, alignments(draw), scratch=1), SPECS["full"](4), SPECS["window"](2)]
    return config_of(specs, retention_interval=intervals(draw, 4))


def without_states_inside(draw) -> hkv.VllmConfig:
    """States at the ends of chunks alone, with drafts."""
    kind = draw(st.sampled_from(sorted(SPECS)))
    specs = [hkv.Mamba(block_size=2, num_speculative_blocks=2), SPECS["full"](2), SPECS[kind](2)]
    return config_of(specs, retention_interval=intervals(draw, 2))


def small_blocks(draw) -> hkv.VllmConfig:
    """Hits end at every token inside blocks of four."""
    specs = [states(4, alignments(draw), scratch=2), SPECS["full"](4), SPECS["window"](1)]
    return config_of(specs, prefix_match_unit=1, retention_interval=intervals(draw, 4))


def ahead(draw) -> hkv.VllmConfig:
    """Keys that cover three tokens after their blocks: states stand, without keys, where others are due later."""
    specs = [states(2, draw(st.sampled_from((1, 1, 4)))), SPECS["full"](2), SPECS["window"](2)]
    interval = draw(st.sampled_from((None, 0, 4, 4, 4)))
    return dataclasses.replace(config_of(specs, retention_interval=interval), hash_lookahead=3)


def prefilled_again(draw) -> hkv.VllmConfig:
    """Drafts' prefill ends some tokens before the chunk: what is behind that is registered by later steps."""
    specs = [states(4, alignments(draw)), SPECS["full"](4), SPECS["window"](4)]
    made = config_of(specs, retention_interval=intervals(draw, 4))
    return dataclasses.replace(made, eagle=True, prefill_lookahead=draw(st.integers(1, 4)))


def branches(draw) -> hkv.VllmConfig:
    """Hits inside blocks that give up a hash block for drafts, and states where others branched off."""
    specs = [states(8, alignments(draw)), SPECS["full"](8), SPECS["window"](2)]
    made = config_of(specs, prefix_match_unit=2, retention_interval=intervals(draw, 8))
    return dataclasses.replace(made, eagle=True, shared_prefix_checkpoint=True)


SHAPES = {
    function.__name__: function
    for function in (two_groups, several_sizes, without_states_inside, small_blocks, ahead, prefilled_again, branches)
}


@pytest.mark.parametrize("shape", SHAPES)
def test_hostile_chunks_of_every_shape(shape):
    @settings(max_examples=60 if shape == "ahead" else 15)
    @given(data=st.data())
    def hostile(data):
        drive(SHAPES[shape](data.draw), data, alone=shape == "small_blocks")

    hostile()

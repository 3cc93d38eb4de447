"""Hostile chunks where chunks leave states behind inside them: in blocks of other sizes, of two groups, with drafts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hkv
from tests.slow.step.test_checkpoints import states
from tests.slow.step.test_hostile_chunks import SPECS, config_of
from tests.step.hostile_chunks import drive


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
def test_hostile_chunks_never_resume_from_another_state(shape):
    @settings(max_examples=60 if shape == "ahead" else 15)
    @given(data=st.data())
    def hostile(data):
        drive(SHAPES[shape](data.draw), data, alone=shape == "small_blocks")

    hostile()

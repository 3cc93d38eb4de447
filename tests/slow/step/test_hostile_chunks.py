"""No chunking, however hostile, makes a row read a state or a token that is not its own: a model in pages is the judge.

`tests.step.paged_model` says what the model is, `tests.step.hostile_chunks` what happens to it.
"""

from __future__ import annotations

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

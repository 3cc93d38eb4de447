"""Hits that end inside blocks, and the copies that they need: whole steps are what the sequential rules say."""

from __future__ import annotations

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hkv.cache.arrivals import jitted
from hkv.dialects.vllm.config import VllmConfig, default_partial_hits
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.model.topology import Topology
from hkv.spec import FullAttention, Mamba, OpaqueState, SlidingWindow
from reference.dialects.vllm.kinds.checkpoints import checkpoint_position
from tests.reference.build import config as build
from tests.step.test_arrivals import arrivals, arrive, unfinished
from tests.step.test_step import Pair, R, T, drawn_tokens

FIELDS = {"hash_block_size": 2, "partial_hits": True}


@st.composite
def configs(draw) -> VllmConfig:
    """A configuration in which hits may end inside blocks."""
    unit = draw(st.sampled_from((1, 2, 2, 3)))
    specs = [
        Mamba(block_size=unit * draw(st.sampled_from((2, 4))), num_speculative_blocks=draw(st.sampled_from((0, 0, 1))))
    ]
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(("full", "full", "window", "mamba", "opaque")))
        if kind == "full":
            specs.append(FullAttention(block_size=unit * draw(st.sampled_from((1, 2, 4)))))
        elif kind == "window":
            specs.append(SlidingWindow(block_size=unit, window=draw(st.sampled_from((2, 3, 9)))))
        elif kind == "mamba":
            specs.append(Mamba(block_size=unit * draw(st.sampled_from((1, 2, 4)))))
        else:
            specs.append(OpaqueState(block_size=unit))
    specs = draw(st.permutations(specs))
    scheduler_block = math.lcm(*(spec.block_size for spec in specs))
    assert default_partial_hits(specs, unit)
    return VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=draw(st.integers(12, 60)),
        hash_block_size=unit,
        scheduler_block_size=scheduler_block,
        partial_hits=True,
        eagle=draw(st.integers(0, 3)) == 0,
        retention_interval=draw(st.sampled_from((None, 0, scheduler_block))),
        shared_prefix_checkpoint=draw(st.booleans()),
        watermark=draw(st.sampled_from((0.0, 0.1))),
        max_model_len=48,
    )


def chunk(pair: Pair, row: int, rest: list[int], stop: bool) -> list[int]:
    """The next tokens of a prompt: up to where its last state is kept, if `stop` and that is near."""
    request, config = pair.rows.request(row), pair.rows.config
    assert request is not None
    last = checkpoint_position(request.num_prompt, config.hash_block_size, config.eagle, 0)
    ends = [end for end in (last, request.shared_prefix) if end > request.num_computed]
    count = min(ends) - request.num_computed if stop and ends else T
    return rest[: min(count, T, pair.rows.allowed(row))]


@settings(max_examples=80)
@given(config=configs(), data=st.data())
def test_hits_inside_blocks_are_the_sequential_operations_in_order(config, data):
    lengths = [n for n in range(1, min(40 - T, min(config.block_sizes) * 20 - T)) if not causes(config, n)]
    assume(lengths)
    pair = Pair(config)
    for waiting in unfinished(pair, data, lengths, (4, 10), 4):
        tokens = drawn_tokens(data, pair)
        for row, prompt in waiting.items():
            rest = prompt[pair.rows.request(row).num_computed :]
            if rest:
                tokens[row] = chunk(pair, row, rest, data.draw(st.integers(0, 3)) > 0)
                tokens[row] *= data.draw(st.integers(0, 4)) > 0
        pair.step(tokens, order=data.draw(st.permutations(range(R))))


def test_states_where_others_branched_off_are_kept():
    pair = Pair(build("full:2,mamba:8", num_blocks=60, eagle=(0,), shared_prefix_checkpoint=True, **FIELDS))
    base = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    arrive(pair, {0: base})
    pair.step([base[:6], [], [], [], []])
    pair.step([base[6:8], [], [], [], []])
    pair.step([base[8:], [], [], [], []])
    arrive(pair, {1: [*base[:7], 5, 5, 5, 5]})
    row = pair.rows.request(1)
    shared = row.shared_prefix
    assert shared
    assert shared % 8
    pair.step([[], [*base[:7], 5][row.num_computed : shared], [], [], []])
    pair.step([[], [5], [], [], []])
    assert arrive(pair, {2: [*base[:7], 4, 4, 4]}) == [shared]


def test_keys_that_a_block_lost_are_not_found():
    """A block with the key of a prompt's tail is handed out, and registered whole: the old entry is of another era."""
    pair = Pair(build("full:8,mamba:8", num_blocks=3, **FIELDS))
    prompt = [1, 2, 3, 4, 5, 6, 7]
    arrive(pair, {0: prompt})
    pair.step([prompt[:6], [], [], [], []])
    pair.finish(0)
    pair.start(1)
    pair.step([[], [9] * 6, [], [], []])
    pair.step([[], [9] * 2, [], [], []])
    _, result = jitted(pair.parameters, pair.state, arrivals({2: prompt, 3: [9] * 9}))
    assert result.alone[:2, :2].tolist() == [[0, 0], [8, 8]]

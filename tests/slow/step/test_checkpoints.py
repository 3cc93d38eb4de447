"""States that chunks leave behind inside them: whole steps are what the sequential rules say with them."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.model.topology import Topology
from hkv.spec import FullAttention, Mamba, OpaqueState, SlidingWindow
from tests.reference.build import config as build
from tests.step.sample import assert_same, expressible
from tests.step.test_arrivals import arrive, unfinished
from tests.step.test_step import OK, Pair, R, T, drawn, drawn_tokens


def states(size: int, alignment: int | None = 1, scratch: int = 0) -> Mamba:
    """A recurrent group of which chunks leave states behind."""
    return Mamba(
        block_size=size,
        num_speculative_blocks=scratch,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=alignment,
    )


@st.composite
def configs(draw, inside: bool = False) -> VllmConfig:
    """Recurrent groups with such states and others, in blocks that a chunk of six tokens passes over."""
    unit = draw(st.sampled_from((1, 2)))
    sizes = (2 * unit, 4) if inside else (unit, 2 * unit)
    specs = [
        states(draw(st.sampled_from(sizes)), draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((0, 0, 1, 3))))
    ]
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(("full", "full", "window", "mamba", "checkpoints", "opaque")))
        size = draw(st.sampled_from(sizes))
        if kind == "full":
            specs.append(FullAttention(block_size=size))
        elif kind == "window":
            specs.append(SlidingWindow(block_size=unit, window=draw(st.sampled_from((2, 3, 9)))))
        elif kind == "mamba":
            specs.append(Mamba(block_size=size, num_speculative_blocks=draw(st.sampled_from((0, 1)))))
        elif kind == "checkpoints":
            specs.append(states(size, draw(st.sampled_from((1, 2, 4, None)))))
        else:
            specs.append(OpaqueState(block_size=unit))
    if inside:
        # Where a block of one token had several keys, no lookup would be the definition's.
        full = FullAttention(block_size=draw(st.sampled_from((2, 4))) if unit == 2 else 1)
        specs = [*(spec for spec in specs[:2] if not spec.reads_all), full]
    specs = draw(st.permutations(specs))
    cacheable = [spec.block_size for spec in specs if spec.prefix_cacheable]
    scheduler_block = math.lcm(*(spec.block_size for spec in specs))
    config = VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=draw(st.integers(8, 60)),
        hash_block_size=unit if inside else math.gcd(*cacheable),
        scheduler_block_size=scheduler_block,
        partial_hits=inside,
        retention_interval=draw(st.sampled_from((None, None, 0, scheduler_block, 2 * scheduler_block))),
        caching=inside or draw(st.integers(0, 9)) > 0,
        eagle=draw(st.integers(0, 3)) == 0,
        watermark=draw(st.sampled_from((0.0, 0.0, 0.1))),
        max_model_len=40,
    )
    return expressible(config)


@settings(max_examples=80)
@given(config=configs(), data=st.data())
def test_steps_are_the_sequential_operations_in_order(config, data):
    drive(config, data)


@settings(max_examples=60)
@given(config=configs(inside=True), data=st.data())
def test_steps_with_hits_inside_blocks_are_the_sequential_operations_in_order(config, data):
    drive(config, data)


def drive(config, data) -> None:
    """Prompts that share beginnings, in chunks long and short, with drafts, steps in flight, refusals and ends."""
    longest = min(40 - T, min(config.block_sizes) * 16 - T)
    lengths = [n for n in range(1, longest) if not causes(config, n)]
    assume(lengths)
    pair = Pair(config)
    for waiting in unfinished(pair, data, lengths, (3, 9), 3):
        tokens = drawn_tokens(data, pair)
        for row, prompt in waiting.items():
            rest = prompt[pair.rows.request(row).num_computed :][:T]
            if rest and data.draw(st.integers(0, 4)):
                tokens[row] = rest[: pair.rows.allowed(row)]
        computed = [request.num_computed if (request := pair.rows.request(row)) else 0 for row in range(R)]
        lookahead = drawn(data, R, st.sampled_from((0, 0, 3)))
        in_flight = list(map(min, drawn(data, R, st.sampled_from((0, 0, 1, 6))), computed))
        pair.step(tokens, lookahead, in_flight, data.draw(st.permutations(range(R))))


def test_a_state_that_still_stands_is_not_taken_for_one_at_the_end_of_its_block():
    """The state after 4 tokens stands at the entry of one after 6, which are registered when 8 are computed.

    Steps in flight keep the block that long; vLLM 0.33 then registers it under the key of 6 tokens.
    """
    pair = Pair(build([FullAttention(block_size=4), states(2)], num_blocks=60))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    arrive(pair, {0: prompt})
    assert pair.step([prompt[:2], [], [], [], []])[0] == OK
    assert pair.step([prompt[2:7], [], [], [], []])[0] == OK
    ((_, _, tokens, block),) = pair.rows.checkpoints
    assert (tokens, pair.rows.blocks(0, 1).index(block)) == (2, 2)
    assert pair.step([prompt[7:8], [], [], [], []], in_flight=[5, 0, 0, 0, 0])[0] == OK
    assert pair.rows.blocks(0, 1)[2] == block
    assert pair.rows.manager.pool.covered[block] == 4


def test_a_state_is_kept_where_others_branched_off():
    """A state every 8 tokens alone: the second request leaves the one after 4, where it left the first, for a third."""
    pair = Pair(build([FullAttention(block_size=2), states(2)], num_blocks=60, retention_interval=8))
    first, second = list(range(1, 13)), [1, 2, 3, 4, 90, 91, 92, 93, 94]
    arrive(pair, {0: first})
    for tokens in (first[:6], first[6:]):
        pair.step([tokens, [], [], [], []])
    assert arrive(pair, {1: second}) == [0]
    assert pair.rows.request(1).shared_prefix == 4
    pair.step([[], second[:6], [], [], []])
    assert [left[2] for left in pair.rows.checkpoints] == [4]
    assert arrive(pair, {2: [1, 2, 3, 4, 80, 81]}) == [4]


AHEAD = 3


@settings(max_examples=60)
@given(config=configs(), data=st.data())
def test_steps_with_keys_ahead_are_the_sequential_operations_in_order(config, data):
    drive(dataclasses.replace(config, hash_lookahead=AHEAD), data)


def test_columns_before_a_state_are_not_looked_at_again_when_their_keys_are_known():
    """Keys come three tokens late: by then a state inside a later chunk stands, and what is before it was looked at."""
    pair = Pair(build([states(1)], num_blocks=60, eagle=(0,), hash_lookahead=AHEAD))
    prompt = list(range(1, 10))
    arrive(pair, {0: prompt})
    for first, last in ((0, 1), (1, 3), (3, 5), (5, 7), (7, 9)):
        in_flight = [3 * (first >= 3), 0, 0, 0, 0]
        assert pair.step([prompt[first:last], [], [], [], []], in_flight=in_flight)[0] == OK
        assert_same(pair.rows, pair.state)

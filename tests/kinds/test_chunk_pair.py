"""Own and previous chunk: what it reads, its hits beside their definition, both engines, and the commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hkv.dialects.vllm.traffic.hit_causes import causes
from hkv.dialects.vllm.traffic.hit_comparison import Case, make_config
from hkv.errors import SpecError
from hkv.oracle.record import Only, draw
from hkv.spec import FullAttention, LayerSpec, SlidingWindow, spec_from_log, spec_from_text
from hkv.spec.chunk_pair import ChunkPair
from hkv.testing.choices import RandomChoices


def test_a_query_reads_its_own_chunk_and_the_one_before():
    spec = spec_from_text("chunk_pair:2:4")
    assert spec == ChunkPair(block_size=2, chunk=4) == spec_from_log(spec.to_log())
    assert [spec.readable(n).start for n in range(13)] == [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert spec.reads(0) == ()
    assert spec.reads(9) == (range(4, 9),)
    with pytest.raises(SpecError, match="multiple of the block"):
        ChunkPair(block_size=4, chunk=6)


def test_it_is_drawn_only_where_it_is_asked_for():
    asked = Only(frozenset({"chunk_pair", "full_attention"}))
    kinds = {group["kind"] for seed in range(30) for group in draw("core", seed, 2, asked)[0].groups}
    assert kinds == {"chunk_pair", "full_attention"}
    kinds = {group["kind"] for seed in range(60) for group in draw("core", seed, 2)[0].groups}
    assert "chunk_pair" not in kinds


@pytest.mark.parametrize("seed", range(40))
def test_hits_are_what_the_definition_says(seed):
    choices = RandomChoices(seed)
    size = choices.pick((1, 2, 4))
    specs: list[LayerSpec] = [ChunkPair(block_size=size, chunk=size * choices.integer(1, 4))]
    if choices.chance(60):
        specs.append(choices.pick((FullAttention(block_size=size), SlidingWindow(block_size=2 * size, window=5))))
    config = make_config(specs, [0] if choices.chance(40) else [], size, 0, 1)
    differ = set()
    for _ in range(60):
        tokens = choices.integer(1, 14 * size)
        entries = {
            (group, end)
            for group, spec in enumerate(specs)
            for end in range(spec.block_size, tokens + 4 * size, spec.block_size)
            if choices.chance(80)
        }
        case = Case(config, tokens, frozenset(entries))
        if case.by_iteration() != case.by_definition():
            differ |= causes(config, tokens) or {"unexplained"}
    assert "unexplained" not in differ


@pytest.mark.parametrize(
    "line",
    [
        "diff --engines numpy,jax --kinds chunk_pair,full_attention --seeds 3 --feature core --version 2",
        "layout --spec chunk_pair:16:64 --num-layers 2",
        "explore --groups chunk_pair:1:2 --num-blocks 3 --requests 1",
    ],
)
def test_commands_take_it(line):
    command = [sys.executable, "-c", "from hkv.cli import main; main()", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

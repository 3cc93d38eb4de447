"""Own and previous chunk: what it reads, its hits beside their definition, both engines, and the commands."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.planning.plan import PlanOptions
from hkv.dialects.vllm.planning.residency import simulate
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.errors import PlanError, SpecError
from hkv.oracle.record import Only, draw
from hkv.spec import FullAttention, LayerSpec, RequestLimits, SlidingWindow, spec_from_log, spec_from_text, spec_to_log
from hkv.spec.chunked_local import ChunkPair
from tests.kinds.drawn_hits import assert_hits_are_defined


def test_a_query_reads_its_own_chunk_and_the_one_before():
    spec = spec_from_text("chunk_pair:2:4")
    assert spec == ChunkPair(block_size=2, chunk=4) == spec_from_log(spec_to_log(spec))
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
    assert_hits_are_defined(specs, size, choices)


@pytest.mark.parametrize(
    "line",
    [
        "diff --engines numpy,jax --kinds chunk_pair,full_attention --seeds 3 --feature core --version 2",
        "layout --spec chunk_pair:16:64 --num-layers 2",
    ],
)
def test_commands_take_it(line):
    command = [sys.executable, "-c", "from hkv.cli import main; main()", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_recorded_checked_explained_and_replayed(tmp_path):
    log, trace = str(tmp_path / "log.jsonl"), tmp_path / "trace.jsonl"
    line = f'{{"timestamp": 0, "tokens": {list(range(60))}, "output_length": 9}}\n'
    trace.write_text(6 * line)
    for line, said in (
        (f"record --engine numpy --feature core --seed 3 --kinds chunk_pair,full_attention -o {log}", "operations"),
        (f"check {log}", "1 of 1 logs agree"),
        (f"explain {log} --line 52", "chunk_pair:8"),
        (f"replay {trace} --groups chunk_pair:4:8,full:4 --num-blocks 60 --engine numpy", "chunk_pair:4:8"),
    ):
        done = CliRunner().invoke(cli, line.split())
        assert (done.exit_code, said in done.output) == (0, True), done.output


def test_it_is_planned():
    geometry = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
    layers = {"a": FullAttention(**geometry), "b": ChunkPair(**geometry, chunk=64)}
    options = PlanOptions(limits=RequestLimits(max_model_len=1000, max_in_flight_tokens=256), layout="LBNHC")
    plan = plan_vllm((layers,), (100_000_000,), options)
    assert [group.spec for group in plan.groups] == list(layers.values())
    assert simulate(plan.groups, 400, options.limits).full_length_blocks == (63, 63 - (999 // 64 - 1) * 4)
    with pytest.raises(PlanError, match="like full attention"):
        plan_vllm((layers,), (100_000_000,), dataclasses.replace(options, hybrid=False))

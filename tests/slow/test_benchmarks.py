"""`benchmarks/replay.py`: its cases, both sides' decisions, what it is without vLLM; `benchmarks/rtp_evictions.py`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import compiled_runs, replay
from benchmarks.rtp_evictions import measure, with_ratios
from hkv.dialects.vllm.schedule.run import VllmReplayedCache
from hkv.oracle.engines import engine_factory
from hkv.replay.schedule import Schedule
from tests.reference.build import allocation


def test_prompts_are_decided_as_the_numpy_engine_decides():
    """Hits, every id, the final queue: what a run hands to the comparison with vLLM."""
    made = replay.stress_arrivals(40)
    schedule = Schedule(max_model_len=max(arrival.prompt for arrival in made) + 16)
    case = replay.Case("prompts", replay.GROUPS, 700, schedule, made)
    mine = compiled_runs.run(case, compiled_runs.prepare(case), ids=True)
    engine, ids, hits = VllmReplayedCache(case.config).engine("numpy", engine_factory("numpy")), [], []
    for arrival in made:
        id = str(arrival.index)
        engine.request_keyed(id, arrival.prompt, arrival.keys())
        found = engine.lookup(id)
        hits.append(found.hit)
        for row in found.blocks:
            ids += row[next((i for i, block in enumerate(row) if block), len(row)) :]
        operation = allocation(id, arrival.prompt - found.hit, found.hit, shared_prefix=None)
        for row in engine.allocate(operation).blocks:
            ids += row
        engine.free(id)
        engine.drop(id)
    theirs = {"hits": hits, "ids": ids, "queue": engine.state().free}
    replay.compare(mine, theirs)
    assert sum(hits) > 0
    ids[5] += 1
    with pytest.raises(replay.click.ClickException, match="ids differ from vLLM's at place 5"):
        replay.compare(mine, theirs)


def test_without_vllm_only_hkv_is_measured_and_that_is_said(tmp_path, monkeypatch):
    trace, made = tmp_path / "trace.jsonl", tmp_path / "made.json"
    lines = [{"timestamp": 100 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i + 1]} for i in range(6)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--mode", "schedule", "--trace", str(trace), "--num-blocks", "900", "--repeats", "1"]
    monkeypatch.setattr(compiled_runs, "IDS", 1 << 14)
    done = CliRunner().invoke(replay.main, [*arguments, "--json", str(made)])
    assert done.exit_code == 0, done.output
    assert "vLLM was not measured" in done.output
    result = json.loads(made.read_text())
    assert "ratio" not in result
    assert "same_decisions" not in result
    assert result["hkv_ns"]["least"] > 0
    assert result["hit_tokens"] == 5 * 512
    assert result["block_operations"] == 6 * 3 * int(np.ceil(605 / 16))


@pytest.mark.parametrize("tree", [True, False])
def test_evictions_take_a_chain_or_a_key(tree: bool) -> None:
    found = with_ratios([measure(keys, tree, 1) for keys in (800, 4_000)])
    assert [each["blocks"] for each in found] == [8 if tree else 2] * 2
    assert found[0]["ratio"] == 1

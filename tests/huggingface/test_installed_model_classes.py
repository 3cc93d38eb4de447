"""The recorded answers against the installed vLLM: a sample of families, one of each way to cache."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.judges.recorded import recorded_cases

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLE = (
    "llama",
    "gemma3_text",
    "gemma3n_text",
    "llama4_text",
    "cohere2",
    "deepseek_v3",
    "deepseek_v4",
    "jamba",
    "nemotron_h",
    "qwen3_next",
    "lfm2_moe",
    "minimax",
)


@pytest.mark.vllm
def test_the_installed_model_classes_answer_as_recorded(tmp_path: pathlib.Path) -> None:
    cases = {name: recorded_cases()[f"library/{name}"] for name in SAMPLE}
    for name, case in cases.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(case.config), encoding="utf-8")
    output = tmp_path / "answers.jsonl"
    command = [sys.executable, "benchmarks/model_classes.py", *map(str, sorted(tmp_path.glob("*.json")))]
    done = subprocess.run(
        [*command, "--ranks", "1,8", "--output", str(output)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for record in map(json.loads, output.read_text(encoding="utf-8").splitlines()):
        recorded = cases[record["name"]].answers
        assert {int(ranks): answer for ranks, answer in record["answers"].items()} == {
            ranks: recorded[ranks] for ranks in recorded if ranks != 2
        }, record["name"]

"""HKV's reading of each recorded config against what vLLM's own model class said: equal, or refused by name."""

from __future__ import annotations

import importlib
import itertools
import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.judges.comparison import read
from benchmarks.judges.recorded import (
    EXPECTED,
    FOLDER,
    Judge,
    Outcome,
    RecordedCase,
    judge,
    judge_caches,
    judge_of,
    plans,
    published,
    recorded_cases,
    records,
    sources,
)
from benchmarks.judges.records import digest
from hkv.errors import ConfigError
from hkv.model.huggingface import Model
from hkv.model.huggingface.families.states import gated_delta_net, kimi_delta, lightning, mamba1, mamba2
from hkv.model.released import released_models

CASES = recorded_cases()
KNOWN = json.loads(EXPECTED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_config_is_read_as_vllm_reads_it_or_refused(case: RecordedCase) -> None:
    judgements = {ranks: judge(case, ranks) for ranks in case.answers}
    differences = [f"tp {ranks}: {each}" for ranks, found in judgements.items() for each in found.differences]
    fields = {each.field.split()[-1] for found in judgements.values() for each in found.differences}
    refusals = [found.message for found in judgements.values() if found.outcome is Outcome.REFUSED_HERE]
    known = set(KNOWN["different"].get(case.name, ()))
    assert not fields - known, differences
    assert not known - fields, "no longer differs: take it out of expected.json (benchmarks/judged_models.py --shrink)"
    if case.name in KNOWN["refused"]:
        assert refusals, "no longer refused: take it out of expected.json (benchmarks/judged_models.py --shrink)"
    else:
        assert not refusals


def test_released_models_were_judged_as_they_are_shipped() -> None:
    judged = {record["name"]: record["config"] for record in records("released")}
    shipped = {model.name: digest(model.config()) for model in released_models()}
    assert judged.items() <= shipped.items(), "ask again: benchmarks/model_classes.py --released --only NAME"


def test_every_planned_config_has_a_judge() -> None:
    planned = [case for case in CASES.values() if plans(case)]
    kinds = {case.name: judge_of(case) for case in planned}
    assert {name for name, kind in kinds.items() if kind is Judge.NONE} == set(KNOWN["unjudged"])
    second = {case.name for case in planned if kinds[case.name] is Judge.TRANSFORMERS and judge_caches(case)}
    assert second == {name for name in KNOWN["caches"] if kinds.get(name) is Judge.TRANSFORMERS}


def test_source_lines_were_read_only_where_there_is_no_other_judge() -> None:
    assert {judge_of(CASES[name]) for name in sources()} == {Judge.SOURCE}


def test_the_lists_name_recorded_configs() -> None:
    assert set(KNOWN["different"]) | set(KNOWN["refused"]) | set(KNOWN["caches"]) <= set(CASES)


UNSERVED = {"glm-5.1-nvfp4", "glm-5.2-nvfp4"}
"""Files that ask for a cache in float8, of which vLLM has no kernels of sparse latent attention on an H100: a matter
of the plan, not of what is read."""


def test_published_files_are_planned_or_refused_for_a_reason_and_equal_vllm() -> None:
    """Unknown fields and all: 200 of them, with those that HKV ships and those of `tests/data/models`."""
    files = published()
    judged = {record["name"]: record["config"] for record in records("published")}
    assert judged == {name: digest(each["config"]) for name, each in files.items() if name not in UNSERVED}, "ask again"
    own = list((FOLDER.parent / "models").glob("*.json"))
    assert len(files) + len(released_models()) + len(own) >= 200
    noted = 0
    for name, each in files.items():
        model = read(each["config"], 1)
        outcome = Outcome.PLANNED_HERE if name in UNSERVED else judge(CASES[f"published/{name}"], 1).outcome
        if isinstance(model, Model):
            assert outcome in (Outcome.EQUAL, Outcome.PLANNED_HERE), name
            assert (outcome is Outcome.EQUAL) == (name not in UNSERVED), name
            noted += any(note.startswith("no part of the cache") for note in model.notes)
        else:
            assert model.startswith(("model_type = ", "text_config = ")), f"{name}: {model}"
            assert outcome is Outcome.REFUSED, name
    assert noted > 15


# Shapes of recurrent states.


def test_shapes_by_hand() -> None:
    assert mamba1(2, intermediate=8192, state=16, kernel=4) == ((3, 4096), (4096, 16))
    sizes = {"intermediate": 8192, "groups": 8, "heads": 128, "head_dim": 64, "state": 128, "kernel": 4}
    assert mamba2(1, **sizes) == ((3, 10240), (128, 64, 128))
    assert mamba2(16, **sizes) == ((3, (8192 + 2 * 16 * 128) // 16), (8, 64, 128))
    delta = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4}
    assert gated_delta_net(4, **delta, drafts=2) == ((5, 2048), (8, 128, 128))
    assert kimi_delta(1, heads=32, head_dim=128, kernel=4) == ((3, 12288), (32, 128, 128))
    assert lightning(2, heads=32, head_dim=128) == ((16, 128, 128),)


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads = 6"):
        lightning(4, heads=6, head_dim=16)


@pytest.mark.vllm
def test_shapes_equal_those_of_an_installed_vllm() -> None:
    utils = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    theirs = utils.MambaStateShapeCalculator
    for ranks, kernel, drafts, heads in itertools.product((1, 2, 4, 8), (2, 4), (0, 3), (8, 32)):
        assert mamba1(ranks, intermediate=64 * heads, state=16, kernel=kernel) == theirs.mamba1_state_shape(
            ranks, 64 * heads, 16, kernel
        )
        for groups in (1, 2, 8):
            ours = mamba2(
                ranks,
                intermediate=64 * heads,
                groups=groups,
                heads=heads,
                head_dim=64,
                state=128,
                kernel=kernel,
                drafts=drafts,
            )
            wanted = theirs.mamba2_state_shape(ranks, 64 * heads, groups, heads, 64, 128, kernel, drafts)
            assert ours == wanted
        delta = {"key_heads": heads // 2, "value_heads": heads, "key_dim": 64, "value_dim": 128, "kernel": kernel}
        assert gated_delta_net(ranks, **delta, drafts=drafts) == theirs.gated_delta_net_state_shape(
            ranks, heads // 2, heads, 64, 128, kernel, drafts
        )
        assert kimi_delta(ranks, heads=heads, head_dim=64, kernel=kernel, drafts=drafts) == theirs.kda_state_shape(
            ranks, heads, 64, conv_kernel_size=kernel, num_spec=drafts
        )
        assert lightning(ranks, heads=heads, head_dim=64) == theirs.linear_attention_state_shape(heads, ranks, 64)


# The recorded answers against the installed vLLM: a sample of families, one of each way to cache.


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

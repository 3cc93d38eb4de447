"""HKV's reading of each recorded config against what vLLM's own model class said: equal, or refused by name."""

from __future__ import annotations

import json

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
from hkv.model.huggingface import Model
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


@pytest.mark.parametrize("case", [each for each in CASES.values() if plans(each)], ids=lambda case: case.name)
def test_a_planned_config_has_a_judge(case: RecordedCase) -> None:
    kind = judge_of(case)
    assert (kind is Judge.NONE) == (case.name in KNOWN["unjudged"])
    if kind is Judge.TRANSFORMERS:
        assert bool(judge_caches(case)) == (case.name in KNOWN["caches"])


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
            assert model.startswith(("model_type = ", "num_hidden_layers, ")), f"{name}: {model}"
            assert outcome is Outcome.REFUSED, name
    assert noted > 15

"""Recorded answers of the judges, and what they say of HKV's reading today.

`tests/data/model_classes` has, one config a line, `library.jsonl` (every config class of transformers at its default
values), `released.jsonl` (the released models that HKV ships, their configs in `hkv/model/released`), `published.jsonl`
(files with fields that HKV does not know, or of quantized weights, which are in `published_configs.json`), and
`caches.jsonl` (the second judge's answers, for configs that vLLM does not build). `expected.json` lists what HKV still
reads otherwise than vLLM, and what it refuses although vLLM serves it: both lists may only become shorter.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.judges.comparison import Difference, cache_differences, layer_differences, plan_differences, read
from hkv.model.huggingface import Model
from hkv.model.released import released_models

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data" / "model_classes"
EXPECTED = FOLDER / "expected.json"


@dataclasses.dataclass(frozen=True)
class RecordedCase:
    """A config and vLLM's answers.

    Attributes:
      name: `library/llama`, `released/gpt-oss-20b`.
      config: the content of its config.json.
      answers: vLLM's, by the number of tensor-parallel ranks; with a key `refused` where it does not serve it.
    """

    name: str
    config: Mapping[str, Any]
    answers: Mapping[int, Mapping[str, Any]]


class Judge(enum.Enum):
    """Authorities that a config's reading is held against, none of them written by HKV."""

    VLLM = "vLLM's model class"
    TRANSFORMERS = "transformers' cache"
    SOURCE = "source lines that were read"
    NONE = "none"


class Outcome(enum.Enum):
    """Outcomes of a config in HKV and in vLLM."""

    EQUAL = "equal"
    RANKS = "equal, and planned on more ranks than vLLM builds it on"
    DIFFERENT = "different"
    REFUSED_HERE = "refused by HKV, planned by vLLM"
    PLANNED_HERE = "planned by HKV, refused by vLLM"
    REFUSED = "planned by neither"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """HKV's reading and plan of a config, held against vLLM's.

    Attributes:
      outcome: in one word.
      differences: values that differ.
      message: why HKV or, where HKV plans it, vLLM refuses.
    """

    outcome: Outcome
    differences: tuple[Difference, ...] = ()
    message: str = ""


@functools.cache
def recorded_cases() -> dict[str, RecordedCase]:
    """Every recorded config, by name."""
    files = {f"released/{model.name}": model.config() for model in released_models()}
    files |= {f"published/{name}": each["config"] for name, each in published().items()}
    found = {}
    for source in ("library", "released", "published"):
        for record in records(source):
            config = files.get(f"{source}/{record['name']}") if isinstance(record["config"], str) else record["config"]
            if config is None:
                continue  # no longer shipped; a test says so
            answers = {int(ranks): answer for ranks, answer in record["answers"].items()}
            name = f"{source}/{record['name']}"
            found[name] = RecordedCase(name, config, answers)
    return found


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Files as they are published, by name: `config` and `origin`. Lists of modules that are not quantized are cut."""
    return json.loads((FOLDER / "published_configs.json").read_text(encoding="utf-8"))


def records(source: str) -> list[dict[str, Any]]:
    """The lines of a file of recordings; none where it is not there."""
    path = FOLDER / f"{source}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def served(answer: Mapping[str, Any]) -> bool:
    """True where vLLM builds the model, which may cache nothing, as an encoder does."""
    return "refused" not in answer


def judge(case: RecordedCase, ranks: int) -> Judgement:
    """HKV's reading and plan on some tensor-parallel ranks, held against vLLM's answer."""
    answer = case.answers[ranks]
    # A file that packs its cache has blocks that its kernels take, which the planner chooses, not the reader.
    packed = answer.get("cache_dtype", "auto") != "auto"
    model = read(case.config, ranks, answer["block_size"] if packed else None)
    if not served(answer):
        if isinstance(model, Model):
            reason = answer["refused"]
            if served(case.answers[1]):
                return Judgement(Outcome.RANKS, (Difference(f"tp {ranks} ranks", "planned", reason),))
            return Judgement(Outcome.PLANNED_HERE, message=reason)
        return Judgement(Outcome.REFUSED, message=model)
    if not isinstance(model, Model):
        return Judgement(Outcome.REFUSED_HERE, message=model)
    differences = (*layer_differences(model, answer), *plan_differences(model, answer))
    return Judgement(Outcome.DIFFERENT if differences else Outcome.EQUAL, differences)


@functools.cache
def recorded_caches() -> dict[str, dict[str, Any]]:
    """Answers of the second judge, by the config's name."""
    return {record["name"]: record["answer"] for record in records("caches")}


@functools.cache
def sources() -> dict[str, dict[str, Any]]:
    """Source lines that were read for configs without another judge, by the config's name."""
    return json.loads((FOLDER / "sources.json").read_text(encoding="utf-8"))


def judge_of(case: RecordedCase) -> Judge:
    """The first judge that there is of a config."""
    if served(case.answers[1]):
        return Judge.VLLM
    if recorded_caches().get(case.name, {}).get("layers"):
        return Judge.TRANSFORMERS
    return Judge.SOURCE if case.name in sources() else Judge.NONE


def plans(case: RecordedCase) -> bool:
    """True for a config that HKV reads, on one rank."""
    return isinstance(read(case.config, 1), Model)


def judge_caches(case: RecordedCase) -> list[Difference]:
    """HKV's reading held against the second judge's answer; it has to be a config that HKV reads."""
    model = read(case.config, 1)
    if not isinstance(model, Model):
        raise ValueError(f"{case.name}: {model}")
    return cache_differences(model, recorded_caches()[case.name])


def found_today() -> dict[str, Any]:
    """The content that `expected.json` would have today: fields that differ and configs refused, by name."""
    different: dict[str, list[str]] = {}
    refused: list[str] = []
    cases = recorded_cases()
    for name, case in cases.items():
        judgements = [judge(case, ranks) for ranks in case.answers]
        fields = sorted({each.field.split()[-1] for judgement in judgements for each in judgement.differences})
        if fields:
            different[name] = fields
        if any(judgement.outcome is Outcome.REFUSED_HERE for judgement in judgements):
            refused.append(name)
    judged = [name for name, case in cases.items() if judge_of(case) is Judge.TRANSFORMERS and plans(case)]
    differing = [name for name in judged if judge_caches(cases[name])]
    unjudged = [name for name, case in cases.items() if judge_of(case) is Judge.NONE and plans(case)]
    return {"different": different, "refused": refused, "caches": differing, "unjudged": unjudged}

"""Records the weights of vLLM's own model classes on each rank, and compares HKV's formulas with them.

Each config is built by the class that vLLM 0.33.0 serves it with, on the meta device, as on a node of eight H100: the
released models at tensor parallel 1, 2 and 8, one of each family in two pipeline stages, and some of them packed, with
their experts dealt out to ranks, or on other GPUs. Packed experts need the package compressed-tensors there. Run
`--record` with the Python of an environment that has vLLM.

Examples:
  build/vllm/bin/python benchmarks/weights.py --record tests/data/planning/weights.jsonl
  python benchmarks/weights.py
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hkv.dialects.vllm.planning.engine_options import device_of
from hkv.dialects.vllm.weights import weights_of
from hkv.errors import HKVError
from hkv.model.released import find

RECORDS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "planning" / "weights.jsonl"

PACKINGS: Mapping[str, Mapping[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "gptq8": {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""Entries in the configs of packed checkpoints, by a short name."""

PACKED = ("llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gemma-2-9b", "mixtral-8x7b")
"""Models that are also asked for as if they were packed in each way."""

DEALT = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b", "llama-4-scout", "qwen3-next-80b-a3b")
"""Models that are also asked for with experts dealt out to ranks."""

ELSEWHERE = ("gpt-oss-20b", "llama-3.1-8b", "deepseek-v4-flash", "qwen3-0.6b")
"""Models that are also asked for on other GPUs."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A model on some ranks.

    Attributes:
      model: its name.
      tp: tensor-parallel ranks.
      pp: pipeline stages.
      ep: experts are dealt out to ranks.
      packing: of `PACKINGS`, or none but the config's own.
      device: the GPU.
    """

    model: str
    tp: int = 1
    pp: int = 1
    ep: bool = False
    packing: str = ""
    device: str = "h100"

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config, with the packing."""
        return {**config, "quantization_config": PACKINGS[self.packing]} if self.packing else dict(config)


def questions(models: list[str]) -> Iterator[Question]:
    """All that is asked."""
    for model in models:
        yield from (Question(model, tp) for tp in (1, 2, 8))
    yield from (Question(model, 2, 2) for model in first_of_families(models))
    for model in PACKED:
        yield from (Question(model, tp, packing=packing) for packing in PACKINGS for tp in (1, 2))
    for model in DEALT:
        yield from (Question(model, tp, ep=True) for tp in (2, 8))
    for model in ELSEWHERE:
        yield from (Question(model, tp, device=device) for device in ("a100", "b200") for tp in (1, 2))


def first_of_families(models: list[str]) -> list[str]:
    """One model of each `model_type`."""
    found: dict[str, str] = {}
    for model in models:
        released = find(model)
        assert released is not None, model
        found.setdefault(str(released.config().get("model_type")), model)
    return list(found.values())


def records() -> list[dict[str, Any]]:
    """Answers of vLLM: questions, with `vllm`, bytes of each stage, or why it refused."""
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def ours(record: Mapping[str, Any]) -> list[int] | HKVError:
    """HKV's answer to the same question."""
    asked = Question(**{key: value for key, value in record.items() if key != "vllm"})
    released = find(asked.model)
    assert released is not None, asked.model
    try:
        found = weights_of(
            asked.config(released.config()),
            tensor_parallel=asked.tp,
            pipeline_parallel=asked.pp,
            expert_parallel=asked.ep,
            capability=device_of(asked.device).capability,
        )
    except HKVError as error:
        return error
    return list(found)


def verdict(record: Mapping[str, Any]) -> str:
    """`equal`, `refused` by both, `unknown` here, or `different`."""
    found, said = ours(record), record["vllm"]
    if isinstance(found, HKVError):
        return "refused" if "refused" in said else "unknown"
    return "equal" if found == said.get("parameters") else "different"


def record_all(path: pathlib.Path, only: list[str], jobs: int, seconds: float) -> None:
    """Asks vLLM, and writes its answers as they come."""
    from benchmarks.judges.children import answers
    from benchmarks.judges.vllm_classes import ModelClasses, silence
    from benchmarks.model_classes import released_cases

    silence()
    classes = ModelClasses()
    cases = {case.name: case for case in released_cases()}
    kept = {json.dumps({**each, "vllm": 0}): each for each in (records() if path.exists() and only else ())}
    wanted = [each for each in questions(list(cases)) if not only or each.model in only]
    asked = {json.dumps({**dataclasses.asdict(each), "vllm": 0}): each for each in wanted}
    calls = (
        (key, functools.partial(ask, classes, each.config(cases[each.model].config), each))
        for key, each in asked.items()
    )
    for key, answer in answers(calls, jobs=jobs, seconds=seconds):
        kept[key] = {**dataclasses.asdict(asked[key]), "vllm": answer}
        print(asked[key], answer, verdict(kept[key]), file=sys.stderr, flush=True)
        order = [json.dumps({**dataclasses.asdict(each), "vllm": 0}) for each in questions(list(cases))]
        lines = (json.dumps(kept[each], separators=(",", ":")) for each in order if each in kept)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ask(classes: Any, config: Mapping[str, Any], question: Question) -> dict[str, Any]:
    """VLLM's answer: bytes of parameters and buffers of each stage, or why it refused."""
    from benchmarks.judges.vllm_classes import RefusedError

    classes.be(device_of(question.device))
    options = {"enable_expert_parallel": True} if question.ep else {}
    try:
        found = classes.parameters(config, question.tp, question.pp, **options)
    except RefusedError as refused:
        return {"refused": str(refused)[:200]}
    return {kind: [stage[kind] for stage in found] for kind in ("parameters", "buffers")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=pathlib.Path, help="ask vLLM, and write its answers here")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these models alone; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="questions at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="that one may take")
    arguments = parser.parse_args()
    if arguments.record:
        record_all(arguments.record, arguments.only, arguments.jobs, arguments.seconds)
        return 0
    judged = [(record, verdict(record)) for record in records()]
    found = collections.Counter(said for _, said in judged)
    models = {record["model"] for record, _ in judged}
    unknown = {record["model"] for record, said in judged if said == "unknown"}
    print(
        f"{len(models)} models, {len(unknown)} of them with weights that HKV does not know; {found.total()} questions:"
    )
    print(", ".join(f"{count} {name}" for name, count in found.most_common()))
    for record, said in judged:
        if said == "different":
            print(record, ours(record))
    return int("different" in found)


if __name__ == "__main__":
    sys.exit(main())

"""Records what vLLM's own model classes cache, config by config: layers, blocks, tokens and the start-up line.

Each config is built by the class that vLLM 0.33.0 serves it with, on the meta device and with dummy weights, as on a
node of eight H100 (`judges/simulated_gpu.py`), at tensor parallel 1, 2 and 8. What cannot be built, or is not served,
is recorded with the reason. Run it with the Python of an environment that has vLLM, which
`benchmarks/make_vllm_environment.py` makes.

Examples:
  build/vllm/bin/python benchmarks/model_classes.py --library --output tests/data/model_classes/library.jsonl
  build/vllm/bin/python benchmarks/model_classes.py tests/data/models/llama.json
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.judges.children import answers
from benchmarks.judges.default_configs import Case, architectures_of, library_cases, loaded_as, supplemented
from benchmarks.judges.recorded import published
from benchmarks.judges.records import digest
from benchmarks.judges.vllm_classes import ModelClasses, RefusedError, silence
from hkv.model.released import released_models


def with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the class that transformers has for its type, where it names none."""
    if config.get("architectures"):
        return config
    return config | {"architectures": architectures_of(config.get("model_type", ""), "text_config" in config)[:1]}


def file_cases(paths: Iterable[pathlib.Path]) -> Iterator[Case]:
    """Configs in files."""
    for path in paths:
        yield Case(path.stem, with_architecture(json.loads(path.read_text(encoding="utf-8"))), str(path))


def released_cases() -> Iterator[Case]:
    """The released models that HKV ships; their configs are not repeated next to the answers."""
    for model in released_models():
        yield published_case(model.name, model.config(), "hkv/model/released")


def published_cases() -> Iterator[Case]:
    """Files as they are published, with fields that HKV does not know; they stand in a file of their own."""
    for name, found in published().items():
        yield published_case(name, found["config"], found["origin"])


def published_case(name: str, file: dict[str, Any], origin: str) -> Case:
    """A config as vLLM can load it here, with the digest of the file as it is."""
    config = supplemented(with_architecture(file), cached=False) | loaded_as(name)
    # Weights alone are packed; what packs them is a package that is not there.
    for part in (config, config.get("text_config", {})):
        if (part.get("quantization_config") or {}).get("quant_method") == "compressed-tensors":
            del part["quantization_config"]
    return Case(name, config, origin, digest(file))


def ask(classes: ModelClasses, case: Case, ranks: Iterable[int]) -> dict[str, Any]:
    """Answers for each number of tensor-parallel ranks; a config refused on one rank is not asked again."""
    found: dict[str, Any] = {}
    for rank in ranks:
        try:
            found[str(rank)] = classes.answer(case.config, rank)
        except RefusedError as refused:
            found[str(rank)] = {"refused": str(refused)}
            if rank == 1:
                break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=pathlib.Path, help="config.json files")
    parser.add_argument("--library", action="store_true", help="every config class of transformers, default values")
    parser.add_argument("--released", action="store_true", help="the released models that HKV ships configs of")
    parser.add_argument("--published", action="store_true", help="the files of published_configs.json")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these cases alone; repeatable")
    parser.add_argument("--ranks", default="1,2,8", help="tensor-parallel ranks")
    parser.add_argument("--jobs", type=int, default=1, help="configs at once")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one config may take")
    parser.add_argument("--output", type=pathlib.Path, help="write the answers here, one config a line")
    arguments = parser.parse_args()
    silence()
    classes = ModelClasses()
    cases = list(file_cases(arguments.configs))
    if arguments.released:
        cases += released_cases()
    if arguments.published:
        cases += published_cases()
    if arguments.library:
        cases += library_cases(classes.architectures)
    chosen = {case.name: case for case in cases if not arguments.only or case.name in arguments.only}
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    questions = ((name, functools.partial(ask, classes, case, ranks)) for name, case in chosen.items())
    lines: dict[str, str] = {}
    for name, found in answers(questions, jobs=arguments.jobs, seconds=arguments.seconds):
        case = chosen[name]
        found = {"1": found} if "refused" in found else found  # the process itself came to an end
        record = {"name": name, "origin": case.origin, "config": case.digest or case.config, "answers": found}
        lines[name] = json.dumps(record, separators=(",", ":"))
        print(name, summary(found), file=sys.stderr, flush=True)
        if arguments.output:
            text = "".join(lines[each] + "\n" for each in chosen if each in lines)
            arguments.output.write_text(text, encoding="utf-8")
    if not arguments.output:
        print("\n".join(lines.values()))
    return 0


def summary(found: dict[str, Any]) -> str:
    """The start-up line, or the reason for its absence, for each number of ranks."""
    said = {rank: answer.get("refused") or answer["plan"].get("line", "no plan") for rank, answer in found.items()}
    return "; ".join(f"tp {rank}: {text}" for rank, text in said.items())


if __name__ == "__main__":
    sys.exit(main())

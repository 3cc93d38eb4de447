"""Records which fields of a config vLLM reads while it builds a model, of those that HKV does not know.

Each type of model that HKV reads is built by vLLM 0.33.0 on the meta device, while every read of its config is
recorded; what the model's own files could read besides, on branches not taken, is added from their source. A field of
any other name cannot matter. The names are written to `hkv/model/huggingface/read_fields.json`, by the decoder's type,
or the type around it; HKV refuses them there, and plans without any other. Run it with the Python of an environment
that has vLLM (`benchmarks/make_vllm_environment.py`).

Example:
  build/vllm/bin/python benchmarks/read_fields.py --jobs 2 --output hkv/model/huggingface/read_fields.json
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.judges.children import answers
from benchmarks.judges.config_reads import ReadFields, names_in_source
from benchmarks.judges.default_configs import Case, library_cases
from benchmarks.judges.records import lines_of
from benchmarks.judges.vllm_classes import ModelClasses, RefusedError, silence
from benchmarks.model_classes import released_cases
from hkv.errors import HKVError
from hkv.model.huggingface.family import type_of
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.reading import DERIVED, decoder_fields, known_around, known_inside

NEVER = frozenset(
    ["architectures", "model_type", "text_config", "auto_map", "self", "kwargs", "get", "pop", "setdefault"]
)
"""Names that say which class reads the rest, or that are no fields."""


def places(fields: Fields) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Each part of a config that HKV reads closed: its type, its place, the names that HKV knows there."""
    yield fields.model_type, fields.path, known_inside(fields) | DERIVED.keys()
    if fields.outer:
        around = type_of(fields.outer)
        yield around, "", known_around(around)


def ask(classes: ModelClasses, case: Case, wanted: frozenset[str]) -> dict[str, Any]:
    """Names that vLLM reads and that HKV does not know, by type, of each wanted part of a config."""
    with ReadFields() as reads:
        try:
            classes.answer(case.config, 1)
        except RefusedError as refused:
            return {"refused": str(refused)}
    top = [each for each in reads.names if getattr(each, "model_type", "") == case.config["model_type"]]
    whole = frozenset[str]().union(*(reads.names[each] for each in top))
    inner = frozenset[str]().union(*(names for each, names in reads.names.items() if each not in top))
    source, found = names_in_source(reads.files), dict[str, Any]()
    for kind, path, known in places(decoder_fields(case.config)):
        if kind in wanted:
            names = (source | (inner if path else whole)) - known - NEVER - set(dir(reads.base))
            found[kind] = sorted(names)
    return found


def table(found: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The file's content: names of every type once, and each type's others."""
    every = set.intersection(*map(set, found.values())) if found else set()
    return {
        "vllm": "0.33.0",
        "every type": sorted(every),
        "types": {kind: sorted(set(found[kind]) - every) for kind in sorted(found)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these cases alone; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="configs at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="that one may take")
    parser.add_argument("--output", type=pathlib.Path, help="write the table here")
    arguments = parser.parse_args()
    silence()
    classes = ModelClasses()
    cases = [*released_cases(), *library_cases(classes.architectures)]
    seen: collections.Counter[str] = collections.Counter()
    questions: list[tuple[str, Any]] = []
    for case in cases:
        try:
            kinds = [kind for kind, _, _ in places(decoder_fields(case.config))]
        except HKVError:
            continue
        new = frozenset(kind for kind in kinds if not seen[kind])
        if new and (not arguments.only or case.name in arguments.only):
            questions.append((case.name, functools.partial(ask, classes, case, new)))
            seen.update(new)
    found: dict[str, Any] = {}
    for name, answer in answers(questions, jobs=arguments.jobs, seconds=arguments.seconds):
        print(name, json.dumps(answer), file=sys.stderr, flush=True)
        if "refused" not in answer:
            found |= answer
        if arguments.output:
            arguments.output.write_text(lines_of(table(found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

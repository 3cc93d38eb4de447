"""Records which fields of a config vLLM reads while it builds a model, of those that HKV does not know.

Each type of model that HKV reads is built by vLLM 0.33.0 on the meta device, while every read of its config is
recorded; what the model's own files could read besides, on branches not taken, is added from their source. A field of
any other name cannot matter. Fields of those names are tried where some config is known to have them: put into the
config with several values, and the model built anew, all names together and by halves where something changes; one with
which layers, plan and longest request stay as they are shapes nothing. The others are written to
`hkv/model/huggingface/read_fields.json`, by the decoder's type, or the type around it. Run it with the Python of an
environment that has vLLM (`benchmarks/make_vllm_environment.py`).

Example:
  build/vllm/bin/python benchmarks/read_fields.py --jobs 2 --output hkv/model/huggingface/read_fields.json
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.judges.children import answers
from benchmarks.judges.config_reads import ReadFields, names_in_source
from benchmarks.judges.default_configs import Case, library_cases
from benchmarks.judges.vllm_classes import ModelClasses, RefusedError, silence
from benchmarks.model_classes import released_cases
from hkv.errors import HKVError
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.inert import INERT
from hkv.model.huggingface.known import DERIVED, known_around, known_families, known_inside, own_fields
from hkv.model.huggingface.reading import decoder_fields
from hkv.model.huggingface.wrappers import type_of

VALUES: tuple[Any, ...] = (True, 2, [1] * 8)
"""Values that are tried, one after the other."""

NEVER = frozenset(["architectures", "model_type", "text_config", "quantization_config", "auto_map", "self", "kwargs"])
"""Names that say which class reads the rest, or that are no fields."""


class Trials:
    """Models built from one config with further fields in a part of it."""

    def __init__(self, classes: ModelClasses, config: Mapping[str, Any], path: str) -> None:
        self.classes, self.config, self.path = classes, config, path
        self.unchanged = self.answer({})

    def answer(self, more: Mapping[str, Any]) -> Any:
        """The caches and the plan, as one value; None where nothing is built."""
        config = copy.deepcopy(dict(self.config))
        place = config
        for part in filter(None, self.path.split(".")):
            place = place[part]
        place.update(more)
        try:
            found = self.classes.answer(config, 1)
        except RefusedError:
            return None
        plan = {name: value for name, value in found["plan"].items() if name != "line"}
        return json.dumps([found["layers"], found["shared"], found["max_model_len"], plan])

    def changing(self, names: list[str], value: Any) -> Iterator[str]:
        """Of some names those with which, at a value, the answer is another, or none."""
        if not names or self.answer(dict.fromkeys(names, value)) == self.unchanged:
            return
        if len(names) == 1:
            yield names[0]
            return
        half = len(names) // 2
        yield from self.changing(names[:half], value)
        yield from self.changing(names[half:], value)

    def inert(self, names: Iterable[str]) -> list[str]:
        """Of some names those with which the answer stays at every value."""
        found = sorted(names)
        for value in VALUES:
            changing = set(self.changing(found, value))
            found = [name for name in found if name not in changing]
        return found


def places(fields: Fields) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Each part of a config that HKV reads closed: its type, its place, the names that HKV knows there."""
    yield fields.model_type, fields.path, known_inside(fields) | DERIVED.keys()
    if fields.outer:
        around = type_of(fields.outer)
        yield around, "", known_around(around)


def ask(classes: ModelClasses, case: Case, wanted: frozenset[str], usual: frozenset[str]) -> dict[str, Any]:
    """Names that may shape a cache and that HKV does not know, by type, for each wanted part of a config."""
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
            tried = names & usual
            inert = Trials(classes, case.config, path).inert(tried) if tried else []
            found[kind] = {"read": sorted(names - set(inert)), "inert": inert}
    return found


def usual_names(cases: Iterable[Case]) -> frozenset[str]:
    """Names that some config has: those that HKV knows of any family, and those of all configs that there are."""
    found = set(INERT).union(*map(own_fields, known_families()))
    for case in cases:
        for values in (case.config, *(value for value in case.config.values() if isinstance(value, dict))):
            found |= values.keys()
    return frozenset(found)


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
    parser.add_argument("--untried", action="store_true", help="try no field: every name that is read counts")
    parser.add_argument("--jobs", type=int, default=1, help="configs at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="that one may take")
    parser.add_argument("--output", type=pathlib.Path, help="write the table here")
    arguments = parser.parse_args()
    silence()
    classes = ModelClasses()
    cases = [*released_cases(), *library_cases(classes.architectures)]
    usual = frozenset[str]() if arguments.untried else usual_names(cases)
    seen: collections.Counter[str] = collections.Counter()
    questions: list[tuple[str, Any]] = []
    for case in cases:
        try:
            kinds = [kind for kind, _, _ in places(decoder_fields(case.config))]
        except HKVError:
            continue
        new = frozenset(kind for kind in kinds if not seen[kind])
        if new and (not arguments.only or case.name in arguments.only):
            questions.append((case.name, functools.partial(ask, classes, case, new, usual)))
            seen.update(new)
    found: dict[str, Any] = {}
    for name, answer in answers(questions, jobs=arguments.jobs, seconds=arguments.seconds):
        print(name, json.dumps(answer), file=sys.stderr, flush=True)
        if "refused" not in answer:
            found |= {kind: each["read"] for kind, each in answer.items()}
        if arguments.output:
            arguments.output.write_text(json.dumps(table(found), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

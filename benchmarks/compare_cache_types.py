"""Compares HKV with vLLM's planner for every released model, type of the cache and generation of GPUs.

vLLM 0.33.0 starts each model with every value of `--kv-cache-dtype` on five simulated GPUs of five compute
capabilities, under its own choice of attention kernels; HKV has to print the same line, or to refuse what vLLM refuses.
A model's class is built once a GPU, and for each type its caching layers are made again from the arguments that they
were made with; a class that chooses kernels itself is built anew for each type. Published files that ask for a type
themselves start with `auto` alone. Run it with the Python of an
environment that has vLLM, which `benchmarks/make_vllm_environment.py` makes; with `--recorded` any Python will do.

Examples:
  build/vllm/bin/python benchmarks/compare_cache_types.py --jobs 2 --record tests/data/planning/cache_types.jsonl.gz
  build/vllm/bin/python benchmarks/compare_cache_types.py --only deepseek-v3.2
  python benchmarks/compare_cache_types.py --recorded tests/data/planning/cache_types.jsonl.gz
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import gzip
import importlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.cache_type_records import DEVICES, MEMORY, TypeAnswers, asking, differences, recorded
from benchmarks.judges import simulated_gpu
from benchmarks.judges.children import answers
from benchmarks.judges.records import message
from benchmarks.judges.vllm_classes import silence
from benchmarks.model_classes import published_case, released_cases
from benchmarks.startup_judge import REFUSALS, Question, Startups
from hkv.dialects.vllm.planning.engine_options import device_of
from hkv.model.released import released_models

LEFT_OUT = {
    "deepseek-v4-flash": "its layers look at options while they are made, and at a GPU",
    "deepseek-v4-pro": "its layers look at options while they are made, and at a GPU",
    "llama-3.3-nemotron-super-49b": "its config class is code of its repository",
}
"""Models that the judge cannot be asked about, and why."""

CACHED = type(functools.cache(len))
"""Functions whose calls are remembered."""


class CacheTypes(Startups):
    """An installed vLLM 0.33.0 whose layers are made again for each type of the cache."""

    def __init__(self) -> None:
        super().__init__()
        loader: Any = self.classes.loader
        loader.record_metadata_for_reloading = lambda model: None  # a third of the time, and nothing is reloaded
        self.types: tuple[str, ...] = tuple(importlib.import_module("vllm.config.cache").KV_CACHE_DTYPES)
        self.base = importlib.import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
        self.made: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def table(self, name: str, config: Mapping[str, Any], types: Iterable[str]) -> dict[str, dict[str, Any]]:
        """A model's answer for each device and type; in a process of its own."""
        found: dict[str, dict[str, Any]] = {}
        simulated_gpu.set_groups(1)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            for device in DEVICES:
                self.classes.be(device_of(device))
                forget()
                found[device] = dict(self._types(folder, name, device, types))
        return found

    def _types(self, folder: str, name: str, device: str, types: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        first, anew = None, False
        for dtype in types:
            options = {} if dtype == "auto" else {"kv_cache_dtype": dtype}
            question = Question(name, device, "OPENAI_API_SERVER", options, {"memory": MEMORY})
            before = dict(os.environ)
            try:
                config = self._arguments(folder, question).create_engine_config(self.contexts.OPENAI_API_SERVER)
                if first is None or anew:
                    self._record(config)
                    first, anew = config, self._chooses(config)
                else:
                    self._make_again(first, config)
                yield dtype, self._planned(config, self.classes._specs(config)[0], question)
            except REFUSALS as error:
                yield dtype, {"refused": f"{type(error).__name__}: {message(error)}"}
            finally:
                os.environ.clear()
                os.environ.update(before)

    def _record(self, config: Any) -> None:
        """Builds a model, and keeps the arguments of its caching layers."""
        self.made.clear()
        originals = {each: each.__dict__["__init__"] for each in _below(self.base) if "__init__" in each.__dict__}
        for each, original in originals.items():
            each.__init__ = self._recording(original)
        try:
            self.model = self.classes._build(config)
        finally:
            for each, original in originals.items():
                each.__init__ = original

    def _recording(self, original: Callable[..., None]) -> Callable[..., None]:
        def made(layer: Any, *values: Any, **options: Any) -> None:
            self.made.setdefault(id(layer), (layer, values, options))
            original(layer, *values, **options)

        return made

    def _chooses(self, config: Any) -> bool:
        """True if the model's class, rather than the layer's, looks at the type of the cache."""
        layers = list(self._caching(config).values())
        if any(id(layer) not in self.made for layer in layers):
            return True  # its file was not yet imported when others' arguments began to be kept
        named = any(
            isinstance(value, type) and hasattr(value, "get_supported_kernel_block_sizes")
            for layer in layers
            for value in (*self.made[id(layer)][1], *self.made[id(layer)][2].values())
        )
        return (
            named
            or any(layer.__module__.startswith("vllm.models.") for layer in layers)
            or any(getattr(layer, "use_sparse", False) for layer in layers)
        )

    def _caching(self, config: Any) -> dict[str, Any]:
        layers = config.compilation_config.static_forward_context
        return {name: layer for name, layer in layers.items() if isinstance(layer, self.base)}

    def _make_again(self, first: Any, config: Any) -> None:
        """The first config's layers once more, under another config."""
        new = {id(first): config, id(first.cache_config): config.cache_config}
        classes = self.classes
        dtype = classes.torch_utils.set_default_torch_dtype(config.model_config.dtype)
        with classes.config.set_current_vllm_config(config), classes.torch.device("meta"), dtype:
            for name, layer in self._caching(first).items():
                _, values, options = self.made[id(layer)]
                type(layer)(
                    *(new.get(id(value), value) for value in values),
                    **{key: new.get(id(value), value) for key, value in options.items()},
                )
                assert name in config.compilation_config.static_forward_context, name


def _below(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _below(each)


def forget() -> None:
    """Empties all of vLLM's memory of function calls, as answers depend on the device."""
    for each in gc.get_objects():
        if type(each) is CACHED and str(each.__module__).startswith("vllm."):
            each.cache_clear()


def ask(only: Collection[str], jobs: int, seconds: float) -> Iterator[TypeAnswers]:
    """VLLM's answers, model by model as they come; why there are none goes to standard error."""
    silence()
    judge = CacheTypes()
    cases = {case.name: (case.config, judge.types) for case in released_cases() if case.name not in LEFT_OUT}
    cases |= {name: (published_case(name, file, "").config, ("auto",)) for name, file in asking().items()}
    asked = {name: case for name, case in cases.items() if not only or name in only}
    questions = ((name, functools.partial(judge.table, name, *case)) for name, case in asked.items())
    for name, found in answers(questions, jobs=jobs, seconds=seconds):
        if "refused" in found:
            print(name, found["refused"], file=sys.stderr, flush=True)
        else:
            yield TypeAnswers.of(name, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these models alone; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--seconds", type=float, default=900.0, help="that one model may take")
    parser.add_argument("--show", type=int, default=40, help="differences to print in full")
    parser.add_argument("--record", type=pathlib.Path, help="write vLLM's answers here, gzipped JSON lines")
    parser.add_argument("--recorded", type=pathlib.Path, help="answers that --record wrote, in place of vLLM")
    arguments = parser.parse_args()
    only = frozenset(arguments.only)
    read = {model.name: model.config() for model in released_models()} | asking()
    counts: collections.Counter[str] = collections.Counter()
    lines: list[str] = []
    for record in recorded(arguments.recorded) if arguments.recorded else ask(only, arguments.jobs, arguments.seconds):
        if only and record.model not in only:
            continue
        lines.append(record.line())
        answered = [answer for _, _, answer in record.answers()]
        counts["refused by vLLM"] += answered.count(None)
        counts["planned by vLLM"] += len(answered) - answered.count(None)
        for difference in differences(read[record.model], record):
            name = difference.known or "DIFFERENT"
            counts[name] += 1
            if not difference.known and counts[name] <= arguments.show:
                print(difference, file=sys.stderr, flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name:40} {count}")
    if arguments.record:
        text = "".join(line + "\n" for line in sorted(lines))
        arguments.record.write_bytes(gzip.compress(text.encode(), mtime=0))
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares HKV's start-up numbers with vLLM's own: `python benchmarks/compare_startup.py --cases 2000`.

Each case is a model under random options of `vllm serve`, on a random GPU with random memory. vLLM 0.33.0 makes its
settings of them, builds the model's own class on the meta device, plans, and logs `GPU KV cache size` and `Maximum
concurrency`; HKV has to have the same settings and print the same line, or refuse what vLLM refuses. Run it with the
Python of an environment that has vLLM, which `benchmarks/make_vllm_environment.py` makes.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gzip
import json
import pathlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.judges.children import answers
from benchmarks.judges.default_configs import architectures_of
from benchmarks.judges.vllm_classes import silence
from benchmarks.model_classes import released_cases
from benchmarks.startup_judge import Question, Startups
from benchmarks.startup_records import difference, question_record
from hkv.model.released import released_models

DEVICES = ("h100", "h100", "h200", "a100", "a100-40gb", "l40s", "gh200")
GIB = 1 << 30

LEFT_OUT = {
    "deepseek_v4": "its layers look at options while they are made, so that none can be asked again",
    "deepseek_v32": "its config here lacks index_n_heads",
    "kimi_linear": "its class needs a GPU to be made",
    "mimo_v2_flash": "its class wants fields that the library's default config has not",
    "minimax": "vLLM 0.33 does not serve it",
}
"""Models that the judge cannot be asked about, and why."""

ARCHITECTURES: dict[str, str] = {}
"""Classes of vLLM's for types that transformers has none for."""


def draw(model: str, key: random.Random, choices: random.Random) -> Question:
    """A question: `key` draws what decides how layers are built, `choices` the rest."""
    options: dict[str, Any] = {"tensor_parallel_size": key.choice((1, 1, 1, 2, 2, 4, 8))}
    device = key.choice(DEVICES)
    plain = ("auto", "auto", "auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    dtype = key.choice((*plain, "int8_per_token_head", "fp8_per_token_head"))
    if dtype != "auto":
        options["kv_cache_dtype"] = dtype
    drafted = key.choice((0, 0, 0, 0, 1, 3, 5))
    if drafted:
        looked_up = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafted, **looked_up}
    optional = {
        "pipeline_parallel_size": (2, 2, 3, 4),
        "decode_context_parallel_size": (options["tensor_parallel_size"], 2),
        "max_model_len": (-1, 1000, 4096, 8192, 20000, 131072),
        "max_num_batched_tokens": (512, 2048, 4096, 16384, 5000),
        "max_num_seqs": (1, 16, 128, 256, 1000),
        "async_scheduling": (True, False, False),
        "enable_prefix_caching": (True, False, False),
        "disable_hybrid_kv_cache_manager": (True, False),
        "enable_chunked_prefill": (True, False),
        "block_size": (16, 32, 64, 128),
        "performance_mode": ("throughput", "interactivity"),
        "num_gpu_blocks_override": (2000, 50000),
        "data_parallel_size": (2, 4),
        "enable_expert_parallel": (True,),
        "all2all_backend": ("nixl_ep", "deepep_low_latency", "deepep_high_throughput"),
    }
    rare = {"disable_hybrid_kv_cache_manager", "enable_chunked_prefill", "num_gpu_blocks_override", "block_size"}
    rare |= {"decode_context_parallel_size", "data_parallel_size", "all2all_backend", "enable_expert_parallel"}
    for name, values in optional.items():
        if choices.random() < (0.12 if name in rare else 0.3):
            options[name] = choices.choice(values)
    memory = {"memory": choices.randrange(1 * GIB, 120 * GIB)}
    if choices.random() < 0.3:
        options["gpu_memory_utilization"] = choices.choice((0.92, 0.5, 0.85, 0.9, 0.95, 0.873))
        total = choices.randrange(30 * GIB, 200 * GIB)
        memory = {"gpu_memory": total, "weights": total // choices.choice((4, 8)), "activations": total // 20}
    context = choices.choice(("OPENAI_API_SERVER", "OPENAI_API_SERVER", "LLM_CLASS", "OPENAI_BATCH_RUNNER"))
    return Question(model, device, context, options, memory)


def questions(models: Iterable[str], cases: int, first: int) -> Iterator[list[Question]]:
    """So many cases of each seed's layers together, as building them takes the longest."""
    names, together, number = list(models), 12, first
    for name in names:  # every model with nothing but a memory, first
        yield [Question(name, "h100", "OPENAI_API_SERVER", {}, {"memory": 80 * GIB})]
    left = cases - len(names)
    while left > 0:
        key = random.Random(number)
        model = names[number % len(names)]
        state = key.getstate()
        found = []
        for index in range(min(together, left)):
            key.setstate(state)
            found.append(draw(model, key, random.Random(f"{number} {index}")))
        yield found
        left, number = left - len(found), number + 1


def load(path: pathlib.Path) -> Mapping[str, Any]:
    config = json.loads(path.read_text(encoding="utf-8"))
    if not config.get("architectures"):
        kind = config.get("model_type", "")
        config["architectures"] = [ARCHITECTURES.get(kind) or architectures_of(kind, "text_config" in config)[0]]
    return config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--released", action="store_true", help="the released models that HKV ships configs of")
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("tests/data/models"), help="config.json's")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these models alone; repeatable")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first random draw")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="that one set of layers may take")
    parser.add_argument("--show", type=int, default=5, help="differences to print in full")
    parser.add_argument("--record", type=pathlib.Path, help="write questions and answers here, gzipped JSON lines")
    arguments = parser.parse_args()
    silence()
    startups = Startups()
    configs = {path.stem: load(path) for path in sorted(arguments.models.glob("*.json"))}
    read: Mapping[str, Mapping[str, Any]] = configs
    if arguments.released:
        configs = {case.name: case.config for case in released_cases()}
        read = {model.name: model.config() for model in released_models()}
    chosen = [name for name in configs if name not in LEFT_OUT and (not arguments.only or name in arguments.only)]
    sets = {str(index): each for index, each in enumerate(questions(chosen, arguments.cases, arguments.first))}
    asked = ((key, functools.partial(startups.answers, configs[each[0].model], each)) for key, each in sets.items())
    counts: collections.Counter[str] = collections.Counter()
    lines: dict[str, list[str]] = {}
    for key, found in answers(asked, jobs=arguments.jobs, seconds=arguments.seconds):
        replies = found if isinstance(found, list) else [found] * len(sets[key])
        for question, reply in zip(sets[key], replies, strict=True):
            record = question_record(question, reply)
            lines.setdefault(key, []).append(json.dumps(record, separators=(",", ":")))
            counts["refused by vLLM" if "refused" in reply else "planned by vLLM"] += 1
            if where := difference(read[question.model], record):
                counts["DIFFERENT"] += 1
                counts[f"  in {where.field}"] += 1
                if counts["DIFFERENT"] <= arguments.show:
                    print(f"{question}\n  {where}\n  {reply.get('line')}", file=sys.stderr, flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name:40} {count}")
    if arguments.record:
        text = "".join(line + "\n" for key in sets for line in lines[key])
        arguments.record.write_bytes(gzip.compress(text.encode(), mtime=0))
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())

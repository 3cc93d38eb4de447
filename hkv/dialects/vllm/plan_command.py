"""`hkv plan` under vLLM 0.33's rules."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from hkv.contract.plan_command import Capacity, ModelPlan, PlanCommand
from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.planning.engine_options import EngineOptions, reported_memory
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.speculation import Speculation, parse_speculation
from hkv.dialects.vllm.planning.tables import capacity_of, print_served
from hkv.errors import ConfigError, FileError, PlanError
from hkv.limits import MAX_MEMORY, parse_bytes, parse_length
from hkv.model.released import find

INDEX_SUFFIX = ".json"
"""Files that list a checkpoint's shards and say how large all of its tensors are."""


class VllmPlanCommand(PlanCommand):
    """One pool of blocks, what fits, and what vLLM says at start-up. Options are `vllm serve`'s, and its defaults."""

    declared = EngineOptions
    replays_workloads = True

    def plan(self, memory: int | None, options: dict[str, Any]) -> ModelPlan:
        planned = _planned(memory, options)
        report = planned.report()
        return ModelPlan(report, lambda console: print_served(console, report, planned.served))

    def serve_line(self, options: dict[str, Any], engines: int) -> str:
        released = find(options["config"])
        words = ["vllm serve", options["config"] if released is None else released.ids[0]]
        flags = {
            "--tensor-parallel-size": options["tp"] if options["tp"] > 1 else None,
            "--pipeline-parallel-size": options["pp"] if options["pp"] > 1 else None,
            "--data-parallel-size": engines if engines > 1 else None,
            "--max-model-len": options["max_model_len"],
            "--kv-cache-dtype": None if options["kv_dtype"] == "auto" else options["kv_dtype"],
        }
        return " ".join([*words, *(f"{name} {value}" for name, value in flags.items() if value is not None)])

    def capacity(self, memory: int | None, options: dict[str, Any]) -> Capacity:
        return capacity_of(_planned(memory, options))


def _planned(memory: int | None, options: dict[str, Any]) -> CachePlan:
    return plan_config(options["config"], engine_options(memory, options), bugs=options["bugs"])


def engine_options(memory: int | None, options: dict[str, Any]) -> EngineOptions:
    """The engine's options that those of `hkv plan` mean: alike in name, or in another form."""
    gpu_memory = _size(options, "gpu_memory")
    if gpu_memory is None and "device" in options["given"]:
        gpu_memory = reported_memory(options["device"])
        if gpu_memory is None and memory is None:
            expected = (
                f"what nvidia-smi says of one {options['device']}: no public report of its memory is known to HKV"
            )
            raise PlanError("--gpu-memory", None, expected)
    length = 0 if options["max_model_len"] == "-1" else parse_length(options["max_model_len"])
    alike = {field.name for field in dataclasses.fields(EngineOptions)} & options.keys()
    in_another_form = {
        "gpu_memory": gpu_memory,
        "gpu_memory_reported": options["gpu_memory"] is None,
        "activations": _size(options, "activations"),
        "weights": size_of_weights(options["weights"], options["tp"] * options["pp"]),
        "kv_cache_memory_bytes": memory,
        "tensor_parallel_size": options["tp"],
        "pipeline_parallel_size": options["pp"],
        "decode_context_parallel_size": options["dcp"],
        "max_model_len": -1 if length == 0 else length,
        "max_in_flight_tokens": options["max_in_flight"],
        "kv_cache_layout": options["layout"],
        "kv_cache_dtype": options["kv_dtype"],
        "speculation": speculation_of_options(options),
    }
    return EngineOptions(**{**{name: options[name] for name in alike}, **in_another_form})


def _size(options: dict[str, Any], name: str) -> int | None:
    text = options[name]
    return None if text is None else parse_bytes(text, f"--{name.replace('_', '-')}")


def size_of_weights(text: str | None, ranks: int) -> int | None:
    """Bytes of weights on each GPU: a size, or an index file whose `metadata.total_size` is dealt out evenly."""
    if text is None:
        return None
    if not text.endswith(INDEX_SUFFIX):
        return parse_bytes(text, "--weights")
    try:
        total = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))["metadata"]["total_size"]
    except OSError as error:
        raise FileError(text, None, "", error.strerror, "a file that can be read, as --weights names it") from None
    except (ValueError, KeyError, TypeError):
        total = None
    if not isinstance(total, int | float) or not 1 <= total <= MAX_MEMORY * ranks:
        raise FileError(
            text, None, "metadata.total_size", total, "bytes of all tensors, as an index of safetensors has"
        )
    return -(-int(total) // ranks)


def speculation_of_options(options: dict[str, Any]) -> Speculation | None:
    """Speculation that `--speculative-config`, or `--draft` and `--speculative-tokens` in its place, ask for."""
    text, draft, tokens = options["speculative_config"], options["draft_path"], options["speculative_tokens"]
    if text is not None:
        for name, value in (("--draft", draft), ("--speculative-tokens", tokens or None)):
            if value is not None:
                raise ConfigError(name, value, "none beside --speculative-config, which says it")
        return parse_speculation(text)
    if draft is not None:
        return Speculation(method="eagle", num_speculative_tokens=tokens or 1, model=draft)
    return Speculation(method="ngram", num_speculative_tokens=tokens) if tokens else None

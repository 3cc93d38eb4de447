"""Questions to vLLM 0.33: the settings, tokens and concurrency with which it starts a model under given options.

`answer` goes the way of `vllm serve`: engine arguments, layers of the model's own class, block sizes, groups, pool, and
the line that is logged. The layers of a model are built once; only their specs are asked for again.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import tempfile
import types
from collections.abc import Mapping
from typing import Any

from benchmarks.judges import simulated_gpu
from benchmarks.judges.records import split_name
from benchmarks.judges.vllm_classes import ModelClasses, message
from hkv.dialects.vllm.planning.engine_options import device_of

BUILT = ("tensor_parallel_size", "kv_cache_dtype", "dtype", "speculative_config")
"""Options that a layer looks at when it is made; others are looked at when it is asked for its spec."""

REFUSALS = (AssertionError, ValueError, TypeError, NotImplementedError, StopIteration, KeyError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Question:
    """A model under options.

    Attributes:
      model: its name.
      device: the GPU's.
      usage_context: the maker of the engine, a name of vLLM's `UsageContext`.
      options: keyword arguments of vLLM's `EngineArgs`.
      memory: bytes for the cache on each GPU, or the three parts from which they are computed: `gpu_memory`, `weights`
        and `activations`.
    """

    model: str
    device: str
    usage_context: str
    options: Mapping[str, Any]
    memory: Mapping[str, int]

    @property
    def built(self) -> str:
        """Key of the layers that the question is about."""
        return json.dumps([self.model, self.device, {name: self.options.get(name) for name in BUILT}])


def _asks_once(layer: Any) -> bool:
    """True for a layer that looks at all options while it is made, so that it cannot be asked under others."""
    return "indexer" in type(layer).__name__.lower() or "deepseekv4" in type(layer).__name__.lower()


class Startups:
    """An installed vLLM 0.33.0 on a simulated GPU. One in a process; one device and one set of layers in each."""

    def __init__(self) -> None:
        self.classes = ModelClasses()
        self.contexts = importlib.import_module("vllm.usage.usage_lib").UsageContext
        self.worker = importlib.import_module("vllm.v1.worker.utils")
        self.distribution = importlib.import_module("vllm.distributed.utils")

    def answers(self, config: Mapping[str, Any], questions: list[Question]) -> list[dict[str, Any]]:
        """Answers to questions about one set of layers: in a process of its own, as classes remember the device."""
        first = questions[0]
        self.classes.be(device_of(first.device))
        simulated_gpu.set_groups(first.options.get("tensor_parallel_size", 1))
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            before = dict(os.environ)
            try:
                built = self._arguments(folder, first, plain=True).create_engine_config(self.contexts.OPENAI_API_SERVER)
                self.classes._build(built)
            except REFUSALS as error:
                return [{"refused": f"layers: {type(error).__name__}: {message(error)}"}] * len(questions)
            finally:
                os.environ.clear()
                os.environ.update(before)
            layers = built.compilation_config.static_forward_context
            anew = any(_asks_once(layer) for layer in layers.values())
            return [self._answer(folder, None if anew else layers, question) for question in questions]

    def _arguments(self, folder: str, question: Question, plain: bool = False) -> Any:
        options = dict(question.options)
        if plain:
            options = {name: options[name] for name in BUILT if options.get(name) is not None}
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        return self.classes.args.EngineArgs(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            load_format="dummy",
            distributed_executor_backend="mp" if ranks > 1 else None,
            **options,
        )

    def _answer(self, folder: str, layers: Any, question: Question) -> dict[str, Any]:
        before = dict(os.environ)
        self.classes.be(device_of(question.device), question.memory.get("gpu_memory"))
        try:
            config = self._arguments(folder, question).create_engine_config(self.contexts[question.usage_context])
            if layers is None:
                self.classes._build(config)
            else:
                config.compilation_config.static_forward_context = layers
            specs, _ = self.classes._specs(config)
            return self._planned(config, specs, question)
        except REFUSALS as error:
            return {"refused": f"{type(error).__name__}: {message(error)}"}
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _planned(self, config: Any, specs: dict[str, Any], question: Question) -> dict[str, Any]:
        classes = self.classes
        memory = self._memory(config, question)
        with classes.config.set_current_vllm_config(config):
            names = [layout.name for layout in self._layouts(config)]
            classes.backends.resolve_kv_cache_layout(config, [names], list(specs.values()))
            workers = self._stages(config, specs)
            groups = classes.planning.get_global_kv_cache_groups(config, workers)
            configs = classes.planning.get_kv_cache_configs(config, workers, [memory] * len(workers), groups)
            scheduler = classes.sizes.generate_scheduler_kv_cache_config(configs)
            tokens, concurrency = classes.sizes.get_kv_cache_capacity(config, scheduler)
            batch = config.scheduler_config
            return {
                "line": classes._start_up_line(config, scheduler),
                "tokens": tokens,
                "concurrency": concurrency,
                "num_blocks": scheduler.num_blocks,
                "memory": memory,
                "max_model_len": config.model_config.max_model_len,
                "max_num_batched_tokens": batch.max_num_batched_tokens,
                "max_num_seqs": batch.max_num_seqs,
                "async_scheduling": batch.async_scheduling,
                "max_concurrent_batches": config.max_concurrent_batches,
                "max_in_flight_tokens": config.max_in_flight_tokens,
                "enable_prefix_caching": config.cache_config.enable_prefix_caching,
                "disable_hybrid_kv_cache_manager": batch.disable_hybrid_kv_cache_manager,
            }

    def _layouts(self, config: Any) -> list[Any]:
        return self.classes.backends.get_supported_kv_cache_layouts(
            self.classes.connector.get_current_attn_backends(config)
        )

    def _memory(self, config: Any, question: Question) -> int:
        """Bytes for the cache, by vLLM's own `request_memory` where they are computed."""
        if "memory" in question.memory:
            return question.memory["memory"]
        total = question.memory["gpu_memory"]
        snapshot = types.SimpleNamespace(total_memory=total, free_memory=total, device_="cuda")
        requested = self.worker.request_memory(snapshot, config.cache_config)
        return requested - question.memory["weights"] - question.memory["activations"]

    def _stages(self, config: Any, specs: dict[str, Any]) -> list[dict[str, Any]]:
        """Each pipeline stage's layers."""
        stages = config.parallel_config.pipeline_parallel_size
        if stages == 1:
            return [specs]
        count = config.model_config.model_arch_config.total_num_hidden_layers
        shares = []
        for stage in range(stages):
            first, last = self.distribution.get_pp_indices(count, stage, stages)
            # Second caches of layers may be counted on, from the number of layers.
            shares.append({name: spec for name, spec in specs.items() if first <= split_name(name)[1] % count < last})
        return shares

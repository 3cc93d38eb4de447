"""Questions to vLLM's own model classes: what a `config.json` caches, and what vLLM plans for it.

`answer` goes the way of `vllm serve`: engine arguments, model class, block size for the backends, each caching layer's
own `get_kv_cache_spec`, groups, pool, and the line that is logged at start-up.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.judges import remote_configs, simulated_gpu
from benchmarks.judges.records import message, pack, spec_record
from hkv.dialects.vllm.planning.engine_options import Device

KV_MEMORY = 80 << 30
"""Bytes for the cache on each GPU, whatever the weights would leave."""


CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")
"""Parameters that vLLM removes when weights are loaded."""

SHARED_MODULES = (
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.models.transformers",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
)
"""Modules that many model files import, so that not every forked process has to."""


class RefusedError(Exception):
    """vLLM does not serve a config; the message is `STAGE: ERROR: what it said`."""


class ModelClasses:
    """An installed vLLM 0.33.0 with the simulated platform. One in a process."""

    def __init__(self) -> None:
        simulated_gpu.start()
        remote_configs.register()
        load = importlib.import_module
        self.torch = load("torch")
        self.config, self.args = load("vllm.config"), load("vllm.engine.arg_utils")
        self.registry = load("vllm.model_executor.models.registry")
        self.loader, self.torch_utils = load("vllm.model_executor.model_loader.utils"), load("vllm.utils.torch_utils")
        self.layers, self.backends = load("vllm.v1.worker.gpu.attn_utils"), load("vllm.v1.attention.backends.utils")
        self.connector = load("vllm.distributed.kv_transfer.kv_connector.utils")
        self.planning, self.sizes = load("vllm.v1.core.kv_cache_planning"), load("vllm.v1.core.kv_cache_utils")
        self.registration = load("vllm.v1.core.single_type_kv_cache_manager")
        self.platform = load("vllm.platforms").current_platform
        self.interface = load("vllm.platforms.interface")
        for name in SHARED_MODULES:
            load(name)
        self.context = load("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER

    def be(self, device: Device, memory: int | None = None) -> None:
        """Answers as that GPU from now on, with its memory in bytes."""
        platform: Any = type(self.platform)
        capability = self.interface.DeviceCapability(*device.capability)
        size = memory or device.memory_gib << 30
        platform.get_device_capability = classmethod(lambda cls, device_id=0: capability)
        platform.get_device_name = classmethod(lambda cls, device_id=0: device.driver_name)
        platform.get_device_total_memory = classmethod(lambda cls, device_id=0: size)
        self.torch.cuda.get_device_capability = lambda device_id=None: device.capability

    @property
    def architectures(self) -> frozenset[str]:
        """The classes that vLLM has for itself."""
        return frozenset(self.registry.ModelRegistry.models)

    def answer(self, config: Mapping[str, Any], tensor_parallel: int = 1) -> dict[str, Any]:
        """The caches and the plan of vLLM for a config on the first of some tensor-parallel ranks.

        Raises:
          RefusedError: vLLM does not serve it, or its class needs more than a simulated GPU.
        """
        simulated_gpu.set_groups(tensor_parallel)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            before = dict(os.environ)
            try:
                return self._answer(folder, tensor_parallel)
            finally:  # the generic backend switches latent attention off for all that follow
                os.environ.clear()
                os.environ.update(before)

    def _answer(self, folder: str, tensor_parallel: int) -> dict[str, Any]:
        stage = "config"
        try:
            vllm_config = self._engine_config(folder, tensor_parallel)
            stage = "model"
            model = self._build(vllm_config)
            stage = "layers"
            specs, shared = self._specs(vllm_config)
            found = {
                "architecture": vllm_config.model_config.architecture,
                "class": type(model).__name__,
                "layers": pack({name: spec_record(spec) for name, spec in specs.items()}),
                "shared": pack(shared),
                "backends": self._backend_names(vllm_config),
                **self._settings(vllm_config),
            }
            del model
            gc.collect()
            found["plan"] = self._plan(vllm_config, specs)
            return found
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # model files raise whatever they like
            raise RefusedError(f"{stage}: {type(error).__name__}: {message(error, folder)}") from error

    def parameters(
        self, config: Mapping[str, Any], tensor_parallel: int, stages: int = 1, **options: Any
    ) -> list[dict[str, int]]:
        """Bytes of parameters and of buffers on each pipeline stage, on the first tensor-parallel rank.

        Scales of keys and values are left out: they are numbers on the CPU once weights are loaded.

        Args:
          config: the content of a config.json.
          tensor_parallel: ranks.
          stages: pipeline stages.
          options: more arguments of vLLM's `EngineArgs`.

        Raises:
          RefusedError: vLLM does not serve it, or its class needs more than a simulated GPU.
        """
        found = []
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            for stage in range(stages):
                simulated_gpu.set_groups(tensor_parallel, stages, stage)
                try:
                    model = self._build(self._engine_config(folder, tensor_parallel, pipeline=stages, **options))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # model files raise whatever they like
                    raise RefusedError(f"{type(error).__name__}: {message(error, folder)}") from error
                named = [each for name, each in model.named_parameters() if not name.endswith(CACHE_SCALES)]
                sizes = {"parameters": named, "buffers": list(model.buffers())}
                found.append({kind: sum(each.nbytes for each in some) for kind, some in sizes.items()})
                del model, named, sizes
                gc.collect()
        return found

    def _engine_config(self, folder: str, tensor_parallel: int, pipeline: int = 1, **options: Any) -> Any:
        arguments = self.args.EngineArgs(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            load_format="dummy",
            tensor_parallel_size=tensor_parallel,
            pipeline_parallel_size=pipeline,
            distributed_executor_backend="mp" if tensor_parallel * pipeline > 1 else None,
            **options,
        )
        return arguments.create_engine_config(usage_context=self.context)

    def _build(self, vllm_config: Any) -> Any:
        dtype = self.torch_utils.set_default_torch_dtype(vllm_config.model_config.dtype)
        with self.config.set_current_vllm_config(vllm_config), self.torch.device("meta"), dtype:
            return self.loader.initialize_model(vllm_config)

    def _specs(self, vllm_config: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Each caching layer's spec, and the layers that read another's cache."""
        self.platform.update_block_size_for_backend(vllm_config)
        with self.config.set_current_vllm_config(vllm_config):
            specs = self.layers.get_kv_cache_spec(vllm_config)
            return specs, self.layers.get_shared_kv_cache_layers(vllm_config)

    def _backend_names(self, vllm_config: Any) -> list[str]:
        layers = vllm_config.compilation_config.static_forward_context.values()
        with self.config.set_current_vllm_config(vllm_config):
            return sorted(
                {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
            )

    def _settings(self, vllm_config: Any) -> dict[str, Any]:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        return {
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
            "cache_dtype": cache.cache_dtype,
            "block_size": cache.block_size,
            "max_model_len": vllm_config.model_config.max_model_len,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_in_flight_tokens": vllm_config.max_in_flight_tokens,
            "prefix_caching": bool(cache.enable_prefix_caching),
            "mamba_cache_mode": cache.mamba_cache_mode,
        }

    def _plan(self, vllm_config: Any, specs: dict[str, Any]) -> dict[str, Any]:
        """Groups, blocks, tokens, concurrency and the start-up line; nothing where nothing is cached, or why not."""
        if not specs:
            return {}
        try:
            return self._planned(vllm_config, specs)
        except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
            return {"refused": f"{type(error).__name__}: {message(error)}"}

    def _planned(self, vllm_config: Any, specs: dict[str, Any]) -> dict[str, Any]:
        with self.config.set_current_vllm_config(vllm_config):
            backends = self.connector.get_current_attn_backends(vllm_config)
            layouts = self.backends.get_supported_kv_cache_layouts(backends)
            names = [layout.name for layout in layouts]
            layout = self.backends.resolve_kv_cache_layout(vllm_config, [names], list(specs.values()))
            groups = self.planning.get_global_kv_cache_groups(vllm_config, [specs])
            configs = self.planning.get_kv_cache_configs(vllm_config, [specs], [KV_MEMORY], groups)
            scheduler = self.sizes.generate_scheduler_kv_cache_config(configs)
            tokens, concurrency = self.sizes.get_kv_cache_capacity(vllm_config, scheduler)
            return {
                "layout": layout.name,
                "blocks": scheduler.num_blocks,
                "tokens": tokens,
                "concurrency": concurrency,
                "line": self._start_up_line(vllm_config, scheduler),
                "groups": [
                    [len(group.layer_names), group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes]
                    for group in groups
                ],
            }

    def _start_up_line(self, vllm_config: Any, scheduler: Any) -> str:
        """The line as vLLM logs it, for a GPU."""
        lines: list[str] = []
        sizes: Any = self.sizes
        logger = sizes.logger
        previous, name = logger.info_once, sizes._kv_cache_device_name
        sizes._kv_cache_device_name = lambda config: "GPU"
        logger.info_once = lambda text, *values, **options: lines.append(text % values)
        try:
            sizes.update_kv_cache_capacity(vllm_config, scheduler)
        finally:
            logger.info_once, sizes._kv_cache_device_name = previous, name
        return lines[0]


def silence() -> None:
    """Switches off the logging of vLLM and transformers, which name reasons that answers carry as well."""
    logging.disable(logging.CRITICAL)

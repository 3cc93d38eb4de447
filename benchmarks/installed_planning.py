"""Plans that an installed vLLM 0.33 makes for HKV's layers, as plain values that HKV's own can be compared with."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.planning.plan import PlanOptions, tensor_record
from hkv.errors import MissingEngineError, PlanError
from hkv.spec import (
    AttentionSpec,
    KernelPages,
    LayerSpec,
    attention_of,
)

MODULES = (
    "torch",
    "vllm.v1.attention.backend",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
)


class InstalledPlanner:
    """The planning functions of an installed vLLM. Importing it takes seconds: make one and keep it.

    Raises:
      MissingEngineError: vLLM is not installed.
    """

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch, backend, planning, sizes, interface, layouts = map(importlib.import_module, MODULES)
        except ImportError as error:
            raise MissingEngineError("vllm", "to plan with it", "benchmarks/make_vllm_environment.py") from error
        self._torch, self._interface, self._planning, self._sizes = torch, interface, planning, sizes
        self._multiple_of, self._layouts = backend.MultipleOf, layouts.KVCacheLayout

    def plan(
        self, workers: Sequence[Mapping[str, LayerSpec]], memory: Sequence[int], options: PlanOptions
    ) -> dict[str, Any]:
        """The plan as `hkv.dialects.vllm.planning.plan.plan_record` writes it, or `{"refused": message}`.

        Args:
          workers: each worker's layers by name.
          memory: bytes for the cache on each.
          options: with a layout; whatever vLLM resolves before planning is given by them.
        """
        config = self._config(options)
        mode = options.limits.mamba_mode
        specs = [{name: self.spec(spec, mode) for name, spec in layers.items()} for layers in workers]
        try:
            return self._plan(config, specs, list(memory), options)
        except (AssertionError, ValueError, TypeError, NotImplementedError, StopIteration) as error:
            return {"refused": f"{type(error).__name__}: {error}"}

    def _plan(
        self, config: Any, specs: list[dict[str, Any]], memory: list[int], options: PlanOptions
    ) -> dict[str, Any]:
        groups = self._planning.get_global_kv_cache_groups(config, specs)
        configs = self._planning.get_kv_cache_configs(config, specs, memory, groups)
        scheduler = self._sizes.generate_scheduler_kv_cache_config(configs)
        cacheable = [g.kv_cache_spec.block_size for g in scheduler.kv_cache_groups if g.kv_cache_spec.prefix_cacheable]
        config.cache_config.block_size = min(cacheable or [scheduler.kv_cache_groups[0].kv_cache_spec.block_size])
        block_sizes = self._sizes.resolve_kv_cache_block_sizes(scheduler, config)
        concurrency = self._sizes.get_max_concurrency_for_kv_cache_config(
            config, dataclasses.replace(configs[0], kv_cache_groups=groups)
        )
        return {
            "num_blocks": configs[0].num_blocks,
            "layout": options.layout,
            "scheduler_block_size": block_sizes[0],
            "hash_block_size": block_sizes[1],
            "max_model_len": config.model_config.max_model_len,
            "request_blocks": round(configs[0].num_blocks / concurrency),
            "tp_replicas": [each.kv_tp_replicas for each in configs],
            "needs_zeroing": dataclasses.replace(configs[0], kv_cache_groups=groups).needs_kv_cache_zeroing,
            "groups": [self._group(group) for group in groups],
            "tensors": [[tensor_record(tensor) for tensor in each.kv_cache_tensors] for each in configs],
        }

    def _group(self, group: Any) -> dict[str, Any]:
        spec = group.kv_cache_spec
        mixed = isinstance(spec, self._interface.UniformTypeKVCacheSpecs)
        inner = list(spec.kv_cache_specs.values()) if mixed else [spec]
        pages = [each.page_size_bytes for each in inner]
        payload = [
            each.real_page_size_bytes if hasattr(each, "real_page_size_bytes") else each.page_size_bytes
            for each in inner
        ]
        return {
            "layers": list(group.layer_names),
            "mixed": mixed,
            "eagle": group.is_eagle_group,
            "block_size": spec.block_size,
            "page_bytes": pages if mixed else pages[0],
            "payload_bytes": payload if mixed else payload[0],
        }

    def spec(self, spec: LayerSpec, mamba_mode: str = "align") -> Any:
        """The spec that vLLM itself has for a layer."""
        cls = getattr(self._interface, layer(spec).vllm_name or "", None)
        if cls is None:
            raise PlanError("kind", spec.kind, "a kind that vLLM has")
        own = {theirs: getattr(spec, ours) for theirs, ours in layer(spec).vllm_fields.items()}
        if (attention := attention_of(spec)) is not None:
            if "cache_role" in own:
                role = self._interface.SparseCacheRole
                own["cache_role"] = role.INDEXER if own["cache_role"] == "indexer" else role.SPARSE
            return cls(**self._geometry(attention), **own)
        own["is_draft"] = spec.is_draft
        if spec.snapshot:
            dtypes = tuple(getattr(self._torch, dtype) for _, dtype in spec.state_tensors)
            return cls(block_size=spec.block_size, dtypes=dtypes, mamba_cache_mode=mamba_mode, **own)
        ring = {"num_kv_heads": 1, "head_size_v": 0, "dtype": self._torch.uint8, "dcp_sharded": False}
        return cls(block_size=spec.block_size, **ring, **own)

    def _geometry(self, spec: AttentionSpec) -> dict[str, Any]:
        alignment = spec.block_stride_alignment
        return {
            "block_size": spec.block_size,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "head_size_v": spec.value_size,
            "dtype": getattr(self._torch, spec.dtype),
            "kv_quant_mode": self._mode(spec.quantization),
            "page_size_padded": spec.page_size_padded,
            "num_head_slots": spec.num_head_slots,
            "state_content_bytes": spec.state_content_bytes,
            "tokens_per_state": spec.tokens_per_state,
            "block_stride_alignment": (
                self._multiple_of(alignment.tokens) if isinstance(alignment, KernelPages) else alignment
            ),
            "max_tp_shards": spec.max_tp_shards,
            "dcp_sharded": spec.cp_sharded,
            "is_draft": spec.is_draft,
        }

    def _mode(self, quantization: str) -> Any:
        modes = self._interface.KVQuantMode
        return modes.__members__.get(quantization.upper(), modes.NONE)

    def _config(self, options: PlanOptions) -> Any:
        limits = options.limits
        layout = self._layouts[options.layout] if options.layout else None
        return SimpleNamespace(
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: layout,
                prefix_cache_retention_interval=None,
                num_gpu_blocks_override=options.num_blocks,
                mamba_cache_mode=limits.mamba_mode,
                enable_prefix_caching=options.caching,
                prefix_match_unit=options.prefix_match_unit,
                block_size=None,
            ),
            model_config=SimpleNamespace(
                max_model_len=limits.max_model_len,
                original_max_model_len=-1 if options.auto_fit else limits.max_model_len,
                supports_kv_cache_grouping=False,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=limits.context_parallel,
                tensor_parallel_size=options.tensor_parallel,
            ),
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=not options.hybrid,
                max_num_encoder_input_tokens=limits.max_num_encoder_input_tokens,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            device_config=SimpleNamespace(device_type="cpu"),
            speculative_config=SimpleNamespace(use_eagle_block_drop=lambda: True, method="eagle")
            if options.eagle
            else None,
            kv_transfer_config=None,
            max_in_flight_tokens=limits.max_in_flight_tokens,
            num_prefill_lookahead_tokens=options.prefill_lookahead,
        )

"""From a model and the options of an engine to its plan."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.planning.engine_options import EngineOptions, device_of
from hkv.dialects.vllm.planning.engine_settings import resolve
from hkv.dialects.vllm.planning.grouping import common_block_size, keeps_layers, with_kept_layers
from hkv.dialects.vllm.planning.kernels import asked_type, gdn_prefill, kda_prefill, model_kernels
from hkv.dialects.vllm.planning.model_checks import (
    check_float_cache,
    check_length,
    check_parallel,
    check_scales,
    least_step_tokens,
    shares_positions,
)
from hkv.dialects.vllm.planning.served import Serving, serve
from hkv.dialects.vllm.planning.speculation import mtp_config
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model


def plan_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    options: EngineOptions,
    *,
    draft: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    bugs: frozenset[str] = frozenset(),
) -> CachePlan:
    """The plan of the model that a `config.json` describes, as `hkv plan CONFIG` makes it.

    Without a draft, that of `options.speculation` is taken.
    """
    model, drafted = read_models(config, options, draft)
    return plan_model(model, options, draft=drafted, bugs=bugs, config=_content(config))


def plan_model(
    model: Model,
    options: EngineOptions,
    *,
    draft: Model | None = None,
    bugs: frozenset[str] = frozenset(),
    config: Mapping[str, Any] | None = None,
) -> CachePlan:
    """The plan of a model that was read on one of `options.tensor_parallel_size` ranks, and its draft's.

    Weights that are not given are computed from the content of its `config.json`.
    """
    settings = resolve(model, options, draft, config)
    speculation = options.speculation
    modules = draft.num_layers if draft is not None else 1
    serving = Serving(
        memory=settings.memory.stages,
        pipeline_parallel=options.pipeline_parallel_size,
        context_parallel=options.decode_context_parallel_size,
        kernel_block_size=options.kernel_block_size,
        layout=options.kv_cache_layout,
        max_model_len=0 if options.max_model_len == -1 else settings.max_model_len,
        max_in_flight_tokens=settings.max_in_flight_tokens,
        max_num_encoder_input_tokens=settings.max_num_batched_tokens,
        concurrent_batches=1 if options.max_in_flight_tokens else settings.max_concurrent_batches,
        num_gpu_blocks_override=options.num_gpu_blocks_override,
        prefix_match_unit=options.prefix_match_unit,
        prefill_lookahead=0 if speculation is None else speculation.prefill_lookahead(modules),
        drops_block=None if speculation is None else speculation.drops_block and draft is not None,
        caching=settings.enable_prefix_caching,
        hybrid=not settings.disable_hybrid_kv_cache_manager,
        bugs=bugs,
    )
    limited = model if options.max_model_len != -1 else dataclasses.replace(model, max_model_len=settings.max_model_len)
    most = dataclasses.replace(serving, memory=settings.memory.most)
    at_most = None if most == serving else functools.cache(lambda: serve(limited, most, draft))
    return CachePlan(model, serve(limited, serving, draft), settings, options.kernel_block_size, at_most)


def read_models(
    config: Mapping[str, Any] | str | os.PathLike[str],
    options: EngineOptions,
    draft: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Model, Model | None]:
    """The model on one tensor-parallel rank, and its draft's, if it has layers of its own."""
    reading = {
        "dtype": options.dtype,
        "kv_dtype": options.kv_cache_dtype,
        "tensor_parallel": options.tensor_parallel_size,
        "context_parallel": options.decode_context_parallel_size,
        "ignore_fields": options.ignore_fields,
        "strict": options.strict,
    }
    speculation = options.speculation
    tokens = 0 if speculation is None else speculation.num_speculative_tokens
    device = device_of(options.device)
    of_model = {"state_dtype": options.state_dtype, "speculative_tokens": tokens, **reading}
    content = _content(config)
    of_model["gdn_prefill"] = gdn_prefill(content, device, options.gdn_prefill_backend)
    of_model["kda_prefill"] = kda_prefill(device, options.kda_prefill_backend)
    own = {**of_model, "kv_dtype": "auto"}
    model = read_model(content, ReadOptions(block_size=options.block_size, **own))
    kernels = model_kernels(content, model, device, options)
    of_model["kv_dtype"] = kernels.kv_dtype
    reading["kv_dtype"] = asked_type(content, model, kernels.kv_dtype)  # a draft has its target's
    if (kernels.block_size, kernels.kv_dtype) != (options.block_size, "auto"):
        model = read_model(content, ReadOptions(block_size=kernels.block_size, **of_model))
    check_scales(content, options.kv_cache_dtype)
    check_float_cache(content, options)
    check_length(content, model, options)
    check_parallel(content, model, options)
    if keeps_layers(model, options.kv_cache_dtype):
        size = common_block_size(read_model(content, ReadOptions(**own)), options.block_size)
        packed = read_model(content, ReadOptions(block_size=size, **of_model))
        model = with_kept_layers(packed, read_model(content, ReadOptions(block_size=size, **own)))
    layouts = model.layouts or kernels.layouts
    model = dataclasses.replace(model, layouts=layouts, least_step_tokens=least_step_tokens(content))
    source = draft if draft is not None or speculation is None else speculation.model
    if source is None and speculation is not None and speculation.method == "mtp":
        source = mtp_config(content)
    if source is None:
        return model, None
    size = next((spec.block_size for spec in model.specs.values()), None)
    content = _content(source)
    drafted = read_model(content, ReadOptions(block_size=size, draft=True, **reading))
    if speculation is not None and speculation.max_model_len is not None:
        return model, dataclasses.replace(drafted, max_model_len=speculation.max_model_len)
    if shares_positions(content, speculation):
        drafted = dataclasses.replace(drafted, max_model_len=max(drafted.max_model_len, model.max_model_len))
    return model, drafted


def _content(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else load_config(os.fspath(config))

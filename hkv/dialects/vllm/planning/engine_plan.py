"""From a model and the options of an engine to its plan: for programs `plan`, for the command line `plan_config`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hkv.contract.bugs import bugs_of_part
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.planning.cache_plan import CachePlan, serve
from hkv.dialects.vllm.planning.engine_options import EngineOptions, device_of
from hkv.dialects.vllm.planning.engine_settings import CacheMemory, resolve
from hkv.dialects.vllm.planning.grouping import common_block_size, keeps_layers, with_kept_layers
from hkv.dialects.vllm.planning.kernels import (
    asked_type,
    check_float_cache,
    check_length,
    check_parallel,
    check_scales,
    gdn_prefill,
    kda_prefill,
    least_step_tokens,
    model_kernels,
    shares_positions,
)
from hkv.dialects.vllm.planning.speculation import IN_BLOCKS, Speculation, block_draft, chained, own_layers
from hkv.errors import ConfigError, PlanError
from hkv.limits import parse_bytes, show_bytes
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model
from hkv.model.huggingface.reading import ignored_in

Config = Mapping[str, Any] | str | os.PathLike[str]
"""A `config.json`, the folder it is in, a released model's name, or its content."""


def plan(
    model: Model | Config,
    memory: int | str | None = None,
    *,
    draft: Model | Config | None = None,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    kernel_block_size: int = 0,
    layout: str | None = None,
    max_model_len: int | None = None,
    max_in_flight_tokens: int | None = None,
    caching: bool | None = None,
    hybrid: bool | None = None,
    bugs: Sequence[str] = (),
    options: EngineOptions | None = None,
) -> CachePlan:
    """Groups, pages, block counts and tensors of a model, and vLLM 0.33's own numbers for it (`hkv plan`).

    Args:
      model: the model, from `read_model`; or its `config.json`, the folder it is in, a released model's name
        (`gpt-oss-20b`), or its content, which is read as vLLM serves it with these options.
      memory: for the cache on each GPU, in bytes or as text such as `80GiB`; None for that of `options`.
      draft: a draft module, read with `draft=True`; or its config, where the model is given so.
      pipeline_parallel: stages.
      context_parallel: of the tensor-parallel ranks, how many split the tokens of full-attention layers.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.
      layout: name of the physical order, or None for the first that can express the model.
      max_model_len: tokens of the longest request; None for the model's, 0 for the longest that fits.
      max_in_flight_tokens: tokens scheduled and not yet settled; None for those of all steps that vLLM runs at once.
      caching: True to reuse prefixes; None for vLLM's default.
      hybrid: False caches every layer like full attention; None for vLLM's default.
      bugs: names of upstream defects to reproduce.
      options: everything else that `vllm serve` is given; what is given above goes before it.

    Raises:
      PlanError: the model does not fit, or cannot be laid out so.
      ConfigError: no such size or defect, options that contradict each other, or a config that cannot be read.
      FileError: there is neither a file nor a released model of that name.
    """
    given = options or EngineOptions()
    above = {
        "kv_cache_memory_bytes": parse_bytes(memory) if isinstance(memory, str) else memory,
        "pipeline_parallel_size": None if pipeline_parallel == 1 else pipeline_parallel,
        "decode_context_parallel_size": None if context_parallel == 1 else context_parallel,
        "kernel_block_size": kernel_block_size or None,
        "kv_cache_layout": layout,
        "max_model_len": -1 if max_model_len == 0 else max_model_len,
        "max_in_flight_tokens": max_in_flight_tokens,
        "enable_prefix_caching": caching,
        "disable_hybrid_kv_cache_manager": None if hybrid is None else not hybrid,
    }
    changed = {name: value for name, value in above.items() if value is not None}
    if isinstance(model, Model):
        if given.tensor_parallel_size not in (1, model.tensor_parallel):
            expected = f"the model's, {model.tensor_parallel}"
            raise ConfigError("tensor_parallel_size", given.tensor_parallel_size, expected)
        changed["tensor_parallel_size"] = model.tensor_parallel
    asked, defects = dataclasses.replace(given, **changed), frozenset(bugs_of_part(bugs, "planning", "vLLM 0.33", BUGS))
    if not isinstance(model, Model):
        if isinstance(draft, Model):
            raise ConfigError("draft", draft.model_type, "a config, as the model's is: it is read for the same options")
        return plan_config(model, asked, draft=draft, bugs=defects)
    if draft is not None and not isinstance(draft, Model):
        raise ConfigError("draft", draft, "a model, from `read_model` with `draft=True`")
    return plan_model(model, asked, draft=draft, bugs=defects)


def plan_config(
    config: Config, options: EngineOptions, *, draft: Config | None = None, bugs: frozenset[str] = frozenset()
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
    modules = 1 if draft is None else draft.num_layers if config is None else chained(config, draft)
    fitted = options.max_model_len == -1
    asked = functools.partial(
        serve,
        model if not fitted else dataclasses.replace(model, max_model_len=settings.max_model_len),
        draft=draft,
        pipeline_parallel=options.pipeline_parallel_size,
        context_parallel=options.decode_context_parallel_size,
        kernel_block_size=options.kernel_block_size,
        max_model_len=0 if fitted else settings.max_model_len,
        max_in_flight_tokens=settings.max_in_flight_tokens,
        max_num_encoder_input_tokens=settings.max_num_batched_tokens,
        concurrent_batches=1 if options.max_in_flight_tokens else settings.max_concurrent_batches,
        caching=settings.enable_prefix_caching,
        layout=options.kv_cache_layout,
        num_blocks=options.num_gpu_blocks_override,
        prefix_match_unit=options.prefix_match_unit,
        prefill_lookahead=0 if speculation is None else speculation.prefill_lookahead(modules),
        eagle=draft is not None and (speculation is None or speculation.drops_block),
        hybrid=not settings.disable_hybrid_kv_cache_manager,
        bugs=bugs,
    )
    memory = settings.memory
    at_most = None if memory.most == memory.stages else functools.cache(lambda: asked(memory.most))
    try:
        served = asked(memory.stages)
    except PlanError as error:
        if at_most is None:
            raise
        raise _between(error, memory, at_most) from None
    return CachePlan(model, served, settings, options.kernel_block_size, at_most)


def _between(error: PlanError, memory: CacheMemory, at_most: Callable[[], object]) -> PlanError:
    """The refusal at the least of an estimate, with the range, and whether the most is refused too."""
    try:
        at_most()
        most = "with the most it fits: --activations SIZE, as vLLM logs it, decides"
    except PlanError:
        most = "with the most it does not fit either"
    between = f"the cache is estimated as {show_bytes(min(memory.stages))} to {show_bytes(min(memory.most))}"
    return PlanError(error.argument, error.value, f"{error.expected}; {between}, this is for the least, and {most}")


def read_models(config: Config, options: EngineOptions, draft: Config | None = None) -> tuple[Model, Model | None]:
    """The model on one tensor-parallel rank, and its draft's, if it has layers of its own."""
    reading: dict[str, Any] = {
        "dtype": options.dtype,
        "kv_dtype": options.kv_cache_dtype,
        "tensor_parallel": options.tensor_parallel_size,
        "context_parallel": options.decode_context_parallel_size,
        "ignore_fields": options.ignore_fields,
        "strict": options.strict,
    }
    content, device, speculation = _content(config), device_of(options.device), options.speculation
    source = _draft_content(content, speculation, draft)
    reading["ignore_fields"] = ignored_in(content, options.ignore_fields, source)
    of_model: dict[str, Any] = {
        **reading,
        "state_dtype": options.state_dtype,
        "speculative_tokens": 0 if speculation is None else speculation.num_speculative_tokens,
        "gdn_prefill": gdn_prefill(content, device, options.gdn_prefill_backend),
        "kda_prefill": kda_prefill(device, options.kda_prefill_backend),
    }
    own: dict[str, Any] = {**of_model, "kv_dtype": "auto"}
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
    if source is None:
        return model, None
    size = next((spec.block_size for spec in model.specs.values()), None)
    reading["ignore_fields"], content = ignored_in(source, options.ignore_fields, content), source
    drafted = read_model(content, ReadOptions(block_size=size, draft=True, **reading))
    if speculation is not None and speculation.max_model_len is not None:
        return model, dataclasses.replace(drafted, max_model_len=speculation.max_model_len)
    if shares_positions(content, speculation):
        drafted = dataclasses.replace(drafted, max_model_len=max(drafted.max_model_len, model.max_model_len))
    return model, drafted


def _draft_content(
    target: Mapping[str, Any], speculation: Speculation | None, draft: Config | None
) -> Mapping[str, Any] | None:
    """The config of the draft's layers: given, the speculation's, or part of the target's; None without layers."""
    if draft is None and speculation is not None:
        if speculation.model is None and speculation.method in ("mtp", "dspark"):
            return own_layers(target, speculation.method)
        draft = speculation.model
    if draft is None:
        return None
    content = _content(draft)
    return block_draft(content) if speculation is not None and speculation.method in IN_BLOCKS else content


def _content(config: Config) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else load_config(os.fspath(config))

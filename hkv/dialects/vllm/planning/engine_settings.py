"""Settings that vLLM 0.33 starts with: its options, and its own defaults where nothing was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.engine_options import EngineOptions, device_of
from hkv.dialects.vllm.planning.memory import CacheMemory, cache_memory
from hkv.dialects.vllm.planning.speculation import ON_V1_RUNNER, WITH_HIDDEN_STATES
from hkv.errors import ConfigError
from hkv.model.huggingface import Model

GIB = 1 << 30
OTHER_CONTEXTS = (2048, 128)
"""Tokens and requests of a step in a usage context that vLLM has no defaults for (`SchedulerConfig`)."""

ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")
"""Types whose model classes have no attention (vLLM 0.33 `IsAttentionFree`); prefixes are not reused by default."""

BATCHED_EXPERTS = ("deepep_low_latency", "nixl_ep")
"""All-to-all backends that take small batches only; 256 tokens a step is their default."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One option with its value, as `vllm serve` has it, and the reason for that value, empty if it was given."""

    option: str
    origin: str = ""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Settings that vLLM 0.33 starts with, and the options that they mean.

    `max_model_len` is not yet fitted into the memory; the tokens in flight are those of all steps that run at once.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool
    max_concurrent_batches: int
    max_in_flight_tokens: int
    enable_prefix_caching: bool
    disable_hybrid_kv_cache_manager: bool
    memory: CacheMemory
    settings: tuple[Setting, ...]


def batch_defaults(options: EngineOptions) -> tuple[int, int]:
    """Tokens and requests of a step on a device (vLLM 0.33 `EngineArgs.get_batch_defaults`)."""
    device = device_of(options.device)
    memory = device.memory_gib * GIB if options.gpu_memory is None else options.gpu_memory
    if options.usage_context not in ("OPENAI_API_SERVER", "LLM_CLASS"):
        return OTHER_CONTEXTS
    serves = options.usage_context == "OPENAI_API_SERVER"
    if memory >= 160 * GIB:
        return 16384, 1024
    if memory >= 70 * GIB and "a100" not in device.driver_name and device.capability != (12, 1):
        return (8192 if serves else 16384), 1024
    return (2048 if serves else 8192), 256


def resolve(
    model: Model, options: EngineOptions, draft: Model | None = None, config: Mapping[str, Any] | None = None
) -> EngineSettings:
    """The settings that vLLM 0.33 starts with (`EngineArgs.create_engine_config`, `VllmConfig.__post_init__`)."""
    _check_ranks(model, options)
    chunked, why_chunked = _chunked_prefill(model, options)
    tokens, requests, sizes = _batch(model, options, chunked)
    length, length_setting = _longest(model, options, draft)
    if tokens < length and not chunked:
        raise ConfigError("--max-num-batched-tokens", tokens, f"at least {length}, the longest request, {why_chunked}")
    if tokens < model.encoder_tokens:
        expected = f"at least {model.encoder_tokens}, an encoder's output for one request"
        raise ConfigError("--max-num-batched-tokens", tokens, expected)
    batches, overlap = _batches(options)
    caching = _prefix_caching(model, options)
    hybrid = _hybrid(model, options)
    in_flight = options.max_in_flight_tokens or batches * tokens
    memory = cache_memory(options, config, tokens, requests)
    return EngineSettings(
        max_model_len=length,
        max_num_batched_tokens=tokens,
        max_num_seqs=requests,
        async_scheduling=overlap.option == "--async-scheduling",
        max_concurrent_batches=batches,
        max_in_flight_tokens=in_flight,
        enable_prefix_caching=caching.option == "--enable-prefix-caching",
        disable_hybrid_kv_cache_manager=hybrid.option == "--disable-hybrid-kv-cache-manager",
        memory=memory,
        settings=(length_setting, *sizes, overlap, caching, hybrid, *_memory_settings(options)),
    )


def _check_ranks(model: Model, options: EngineOptions) -> None:
    ranks, context = options.tensor_parallel_size, options.decode_context_parallel_size
    if model.tensor_parallel != ranks:
        raise ConfigError("tensor_parallel_size", ranks, f"the model's own, {model.tensor_parallel}")
    if ranks % context:
        expected = f"a divisor of the {ranks} tensor-parallel ranks, which are the ones that split tokens"
        raise ConfigError("decode_context_parallel_size", context, expected)


def _chunked_prefill(model: Model, options: EngineOptions) -> tuple[bool, str]:
    if model.encoder_tokens:
        return False, "as prompts of a model with an encoder never are computed in chunks"
    chunked = True if options.enable_chunked_prefill is None else options.enable_chunked_prefill
    if (
        not chunked
        and any(spec.snapshot for spec in model.specs.values())
        and _prefix_caching(model, options).option == "--enable-prefix-caching"
    ):
        expected = "true: states at block boundaries need it (--no-enable-prefix-caching keeps none)"
        raise ConfigError("enable_chunked_prefill", chunked, expected)
    return chunked, "as prompts are not computed in chunks"


def _batch(model: Model, options: EngineOptions, chunked: bool) -> tuple[int, int, tuple[Setting, Setting]]:
    """Tokens and requests of a step, and how they came about."""
    tokens, requests = batch_defaults(options)
    length = model.max_model_len if options.max_model_len in (None, -1) else options.max_model_len
    assert length is not None
    where = f"{options.usage_context} on {device_of(options.device).name}"
    if options.all2all_backend in BATCHED_EXPERTS and options.enable_expert_parallel and options.data_parallel_size > 1:
        tokens, where = 256, f"{options.all2all_backend} between {options.data_parallel_size} engines"
    if options.performance_mode == "throughput":
        tokens, requests, where = 2 * tokens, 2 * requests, f"{where}, doubled for throughput"
    requests = options.max_num_seqs or requests
    if options.max_num_batched_tokens is None:
        if not chunked and length > tokens:
            tokens, where = length, "the longest request, as prompts are not computed in chunks"
        if tokens < model.least_step_tokens:
            tokens, where = model.least_step_tokens, "a video, which is computed in one step"
        if requests * length < tokens:
            tokens, where = requests * length, f"{requests} requests of {length} tokens"
        token_setting = Setting(f"--max-num-batched-tokens {tokens}", where)
    else:
        tokens = options.max_num_batched_tokens
        token_setting = Setting(f"--max-num-batched-tokens {tokens}")
    if options.max_num_seqs is None:
        requests = min(requests, tokens)
    elif requests > tokens:
        raise ConfigError(
            "--max-num-batched-tokens", tokens, f"at least {requests}, a token for each request of a step"
        )
    origin = "" if options.max_num_seqs else where
    return tokens, requests, (token_setting, Setting(f"--max-num-seqs {requests}", origin))


def _longest(model: Model, options: EngineOptions, draft: Model | None) -> tuple[int, Setting]:
    length = options.max_model_len
    setting = Setting(f"--max-model-len {length}")
    if length is None or length == -1:
        setting = Setting(f"--max-model-len {model.max_model_len}", "the model's config")
        length = model.max_model_len
    if draft is not None and draft.max_model_len < length and not _on_v1_runner(options):
        length = draft.max_model_len
        setting = Setting(f"--max-model-len {length}", "the draft's, which cannot be skipped for longer requests")
    return length, setting


def _on_v1_runner(options: EngineOptions) -> bool:
    return options.speculation is not None and options.speculation.method in ON_V1_RUNNER


def _batches(options: EngineOptions) -> tuple[int, Setting]:
    """Steps that run at the same time (vLLM 0.33 `max_concurrent_batches`): one more when scheduled ahead."""
    stages, method = options.pipeline_parallel_size, options.speculation and options.speculation.method
    if method in ON_V1_RUNNER:
        if options.async_scheduling:
            raise ConfigError("async_scheduling", True, f"false with speculative method {method}")
        return stages, Setting("--no-async-scheduling", f"speculative method {method}")
    ahead = True if options.async_scheduling is None else options.async_scheduling
    origin = "nothing forbids it" if options.async_scheduling is None else ""
    return stages + ahead, Setting("--async-scheduling" if ahead else "--no-async-scheduling", origin)


def _prefix_caching(model: Model, options: EngineOptions) -> Setting:
    if model.encoder_tokens:
        if options.enable_prefix_caching:
            raise ConfigError("enable_prefix_caching", True, "false: blocks of cross attention are never reused")
        origin = "" if options.enable_prefix_caching is False else "the model reads an encoder's output"
        return Setting("--no-enable-prefix-caching", origin)
    if options.enable_prefix_caching is not None:
        return Setting("--enable-prefix-caching" if options.enable_prefix_caching else "--no-enable-prefix-caching")
    if model.model_type in ATTENTION_FREE:
        return Setting("--no-enable-prefix-caching", "its model class has no attention")
    return Setting("--enable-prefix-caching", "the model can")


def _hybrid(model: Model, options: EngineOptions) -> Setting:
    """The manager that vLLM 0.33 takes: drafts that read hidden states cannot be beside chunks of their own blocks."""
    names = ("--no-disable-hybrid-kv-cache-manager", "--disable-hybrid-kv-cache-manager")
    chunks = any(kinds.layer(spec).vllm_name == "ChunkedLocalAttentionSpec" for spec in model.specs.values())
    needed = chunks and options.speculation is not None and options.speculation.method in WITH_HIDDEN_STATES
    if needed and options.disable_hybrid_kv_cache_manager is False:
        expected = (
            f"true, or none, with chunked attention and method {options.speculation and options.speculation.method}"
        )
        raise ConfigError("disable_hybrid_kv_cache_manager", False, expected)
    if options.disable_hybrid_kv_cache_manager is not None:
        return Setting(names[options.disable_hybrid_kv_cache_manager])
    return Setting(names[needed], "chunked attention beside such a draft" if needed else "the model can")


def _memory_settings(options: EngineOptions) -> Iterator[Setting]:
    if options.kv_cache_memory_bytes is not None:
        yield Setting(f"--kv-cache-memory-bytes {options.kv_cache_memory_bytes}")
    else:
        origin = "vLLM's default" if options.gpu_memory_utilization == 0.92 else ""
        yield Setting(f"--gpu-memory-utilization {options.gpu_memory_utilization:g}", origin)

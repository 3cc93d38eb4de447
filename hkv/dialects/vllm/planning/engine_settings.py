"""Settings that vLLM 0.33 starts with: its options, its own defaults where nothing was asked for, memory for the cache.

Weights are computed from the shapes of vLLM's classes. What a forward pass and CUDA graphs take besides them only a GPU
knows: it is estimated as a range, and the plan is for the most that it may be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.engine_options import EngineOptions, device_of
from hkv.dialects.vllm.planning.speculation import IN_BLOCKS, ON_V1_RUNNER, WITH_HIDDEN_STATES
from hkv.dialects.vllm.weights import rotary_tables, weights_of
from hkv.errors import ConfigError, PlanError
from hkv.limits import show_bytes
from hkv.model.huggingface import Model
from hkv.model.huggingface.common_fields import served_dtype
from hkv.model.huggingface.loading import ConfigFile
from hkv.model.huggingface.reading import QUANTIZATION, decoder_fields

GIB = 1 << 30
OTHER_CONTEXTS = (2048, 128)
"""Tokens and requests of a step in a usage context that vLLM has no defaults for (`SchedulerConfig`)."""

ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")
"""Types whose model classes have no attention (vLLM 0.33 `IsAttentionFree`); prefixes are not reused by default."""

DRAFTING = (*WITH_HIDDEN_STATES, *IN_BLOCKS)
"""Methods whose drafts read the target's hidden states (vLLM 0.33 `use_eagle`)."""

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
    on_v1_runner = options.speculation is not None and options.speculation.on_v1_runner
    if draft is not None and draft.max_model_len < length and not on_v1_runner:
        length = draft.max_model_len
        setting = Setting(f"--max-model-len {length}", "the draft's, which cannot be skipped for longer requests")
    return length, setting


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
    needed = chunks and options.speculation is not None and options.speculation.method in DRAFTING
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


# Memory for the cache on each GPU: given, or what weights and all else leave of the GPU's (vLLM 0.33 `Worker`).


MIB, GIB = 1 << 20, 1 << 30

LARGE_TABLES = 256 * MIB
"""Bytes of tables of rotary positions beyond which they are counted by themselves; smaller ones are in the estimate."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a GPU's memory: bytes from the least to the most that is expected; `given`, `computed`, `estimated`."""

    least: int
    most: int
    origin: str


@dataclasses.dataclass(frozen=True)
class CacheMemory:
    """Bytes for the cache on the GPUs of each pipeline stage: in `stages` with the most that all else may take.

    In `most` it takes the least. `parts` are a GPU's memory, each stage's weights, large tables of rotary positions and
    all else; none where the memory was given itself. Of each GPU the engine takes `taken` bytes in all. `unpacked` is
    the element type of computed weights, where their packing may be missing from a shipped part of a config.
    """

    stages: tuple[int, ...]
    most: tuple[int, ...]
    parts: Mapping[str, tuple[Part, ...]] = dataclasses.field(default_factory=dict)
    taken: int = 0
    unpacked: str = ""

    @property
    def origin(self) -> str:
        """`given`, `computed` from given parts, or `estimated` where a part of it is."""
        origins = {part.origin for parts in self.parts.values() for part in parts}
        return next((each for each in ("estimated", "computed") if each in origins), "computed" if origins else "given")

    def record(self) -> dict[str, Any]:
        """Plain values, each part with its origin."""
        return {
            "cache": {"stages": list(self.stages), "most": list(self.most), "origin": self.origin},
            "taken": self.taken or None,
            "unpacked": self.unpacked or None,
            **{name: [dataclasses.asdict(part) for part in parts] for name, parts in self.parts.items()},
        }


def cache_memory(options: EngineOptions, config: Mapping[str, Any] | None, tokens: int, requests: int) -> CacheMemory:
    """Bytes for the cache (vLLM 0.33 `request_memory`, `Worker.determine_available_memory`).

    `config` is the content of the model's `config.json`, None where it is not known; tokens and requests are of one
    step. ConfigError for weights that are wanted and not known, PlanError where the memory is neither given nor can be
    computed, or nothing is left of it.
    """
    stages = options.pipeline_parallel_size
    if options.kv_cache_memory_bytes is not None:
        given = (options.kv_cache_memory_bytes,) * stages
        return CacheMemory(given, given)
    if options.gpu_memory is None:
        expected = "bytes for the cache on each GPU, or --gpu NAME (--gpu-memory SIZE) to compute them"
        raise PlanError("--memory", None, expected)
    weights, rest = _weights(options, config), _rest(options, config, tokens, requests)
    origin = "estimated" if options.gpu_memory_reported else "given"
    taken = math.ceil(options.gpu_memory * options.gpu_memory_utilization)
    tables = _tables(options, config)
    beside = sum(part.most for part in tables)
    _check_fits(options, weights, beside, rest, taken)
    return CacheMemory(
        stages=tuple(taken - part.most - beside - rest.most for part in weights),
        most=tuple(taken - part.least - beside - rest.least for part in weights),
        parts={
            "gpu": (Part(options.gpu_memory, options.gpu_memory, origin),),
            "weights": weights,
            **({"tables": tables} if tables else {}),
            "activations": (rest,),
        },
        taken=taken,
        unpacked=_unpacked(options, config),
    )


def _check_fits(options: EngineOptions, weights: tuple[Part, ...], tables: int, rest: Part, taken: int) -> None:
    """Makes sure that something is left for the cache on every stage."""
    most = max(part.most for part in weights) + tables
    if most + rest.most < taken:
        return
    name = "--gpu-memory" if not options.gpu_memory_reported else "--gpu"
    value = options.device if options.gpu_memory_reported else options.gpu_memory
    share = f"{show_bytes(taken)}, {options.gpu_memory_utilization:g} of its memory"
    what = "weights and rotary tables" if tables else "weights"
    sizes = f"{show_bytes(most)} of {what} on each GPU ({weights[0].origin})"
    if most < taken:
        between = "" if rest.least == rest.most else f"{show_bytes(rest.least)} to "
        sizes += f" and {between}{show_bytes(rest.most)} of activations and CUDA graphs ({rest.origin})"
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    raise PlanError(name, value, f"room for {sizes} in {share}: more than {ranks} of them, or larger ones")


def _weights(options: EngineOptions, config: Mapping[str, Any] | None) -> tuple[Part, ...]:
    """Weights on each GPU of each stage."""
    if options.weights is not None:
        return (Part(options.weights, options.weights, "given"),) * options.pipeline_parallel_size
    if config is None:
        raise PlanError("weights", None, "their bytes on each GPU (--weights), or the model's whole config")
    if isinstance(config, ConfigFile) and config.unweighed:
        expected = "their bytes on each GPU (--weights SIZE), or its config.json: this part of a name does not say them"
        raise PlanError("weights", config.unweighed.lstrip("-_."), expected)
    found = weights_of(
        config,
        tensor_parallel=options.tensor_parallel_size,
        pipeline_parallel=options.pipeline_parallel_size,
        expert_parallel=options.enable_expert_parallel,
        dtype=options.dtype,
        capability=device_of(options.device).capability,
    )
    return tuple(Part(size, size, "computed") for size in found)


def _tables(options: EngineOptions, config: Mapping[str, Any] | None) -> tuple[Part, ...]:
    """Tables of rotary positions on each GPU, where they are large and the weights next to them computed."""
    if options.weights is not None or config is None:
        return ()
    size = rotary_tables(config, dtype=options.dtype) or 0
    return (Part(size, size, "computed"),) if size > LARGE_TABLES else ()


def _unpacked(options: EngineOptions, config: Mapping[str, Any] | None) -> str:
    """The element type of computed weights where a shipped config is not a whole file, and says nothing of packing."""
    if options.weights is not None or not isinstance(config, ConfigFile) or config.whole:
        return ""
    fields = decoder_fields(config)
    packed = QUANTIZATION in fields.values or QUANTIZATION in fields.outer
    return "" if packed else options.dtype or served_dtype(fields)[0]


def _rest(options: EngineOptions, config: Mapping[str, Any] | None, tokens: int, requests: int) -> Part:
    """All else that is taken while vLLM profiles: activations at their peak, logits, CUDA graphs, communication.

    The least: a step's tokens before and inside an MLP, or its logits in float32 and one copy, whichever are more, and
    256 MiB. The most: twice those tokens, or logits with what sampling makes of them (14 bytes each), and graphs of
    1.5 GiB (with up to 256 requests in a step 0.5 GiB), 512 MiB of tables and kernels, 1 GiB for talk between ranks.
    """
    if options.activations is not None:
        return Part(options.activations, options.activations, "given")
    if config is None:
        raise PlanError("activations", None, "their bytes on each GPU (--activations), or the model's whole config")
    values = decoder_fields(config).values
    ranks = options.tensor_parallel_size

    def number(*names: str) -> int:
        return next((values[name] for name in names if isinstance(values.get(name), int)), 0)

    hidden, vocabulary = number("hidden_size", "d_model"), number("vocab_size")
    routed = number("num_experts_per_tok", "top_k_experts", "experts_per_token") * number("moe_intermediate_size")
    inner = max(number("intermediate_size", "decoder_ffn_dim"), routed) // ranks
    step = 2 * tokens * (2 * hidden + 2 * inner)
    logits = requests * vocabulary
    graphs = GIB // 2 if requests <= 256 else 3 * GIB // 2
    least = max(step, 8 * logits) + 256 * MIB
    talk = GIB if ranks * options.pipeline_parallel_size > 1 else 0
    most = max(2 * step, 14 * logits) + graphs + GIB // 2 + talk
    return Part(least, most, "estimated")

"""Memory for the cache on each GPU: given, or what weights and all else leave of the GPU's (vLLM 0.33 `Worker`).

Weights are computed from the shapes of vLLM's classes. What a forward pass and CUDA graphs take beside them only a GPU
knows: it is estimated as a range, and the plan is for the most that it may be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.planning.engine_options import EngineOptions, device_of
from hkv.dialects.vllm.weights import rotary_tables, weights_of
from hkv.errors import PlanError
from hkv.limits import show_bytes
from hkv.model.huggingface.closed import QUANTIZATION
from hkv.model.huggingface.common_fields import served_dtype
from hkv.model.huggingface.loading import ConfigFile
from hkv.model.huggingface.reading import decoder_fields

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
    """Tables of rotary positions on each GPU, where they are large and the weights beside them computed."""
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

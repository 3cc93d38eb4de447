"""Attention kernels of a model on a device, and what follows from them (vLLM 0.33)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.backends import (
    AttentionLayer,
    Kernel,
    cache_types,
    choose,
    common_block,
    common_layouts,
    indexer_kernel,
    stored_type,
)
from hkv.dialects.vllm.planning.engine_options import Device, EngineOptions, device_of
from hkv.dialects.vllm.planning.grouping import keeps_layers
from hkv.dialects.vllm.planning.model_checks import reads_ahead
from hkv.errors import ConfigError
from hkv.model.huggingface import Model
from hkv.model.huggingface.common_fields import quantized_cache
from hkv.model.huggingface.reading import decoder_fields
from hkv.spec import AttentionSpec

FLASHINFER_KEYS = 128
"""Elements of a key that FlashInfer's kernels for gated delta nets take on Blackwell."""

WITH_SINKS = ("gpt_oss", "mimo_v2", "mimo_v2_flash")
"""Types whose layers have learned sinks."""

OWN_KERNELS = ("deepseek_v4", "inkling_text")
"""Types whose model classes name kernels of their own; their families say which types of the cache those take."""

SPARSE_KEYS = ("minimax_m3", "minimax_m3_vl_text", "minimax_m3_vl")
"""Types whose layers of picked keys and values store no packing but NVFP4, with Blackwell's kernels."""

SPARSE_KERNEL = Kernel("MINIMAX_M3_SPARSE", (128,), multiples=False, refuses=False)
"""Kernel of such layers."""

UNLISTED = ("falcon_h1",)
"""Types with recurrent states whose configs do not list the layers that attend, without which TurboQuant is refused."""

NOPE_SIZES = {"glm4_moe_lite": 192, "glm_moe_dsa": 192, "hy_v4": 192, "mistral4": 64}
"""Elements of a latent layer's key without positions where a file does not say; 128 elsewhere (transformers 5.20)."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Consequences of kernels: tokens per block, the type that is stored, and orders of memory, best first.

    None leaves blocks to the model's reader, and takes any order.
    """

    block_size: int | None
    kv_dtype: str
    layouts: tuple[str, ...] | None


def model_kernels(config: Mapping[str, Any], model: Model, device: Device, options: EngineOptions) -> Kernels:
    """The kernels that vLLM 0.33 takes for a model's layers (`Platform.update_block_size_for_backend`)."""
    asked = options.kv_cache_dtype
    if asked not in (*cache_types(), "float32"):
        raise ConfigError("kv_cache_dtype", asked, f"one of {', '.join(cache_types())}")
    if not model.attention_specs:
        return Kernels(options.block_size, "auto", None)
    if model.model_type in OWN_KERNELS:
        return Kernels(options.block_size, asked, None)
    stored, looked_up = _types(config, model, device, asked)
    chosen: dict[str, Kernel] = {}
    # vLLM asks a kernel for its blocks with the size of the model's heads, which is that of the largest.
    for spec in sorted(model.attention_specs, key=lambda spec: -spec.head_size):
        if spec.quantization == "fp8_indexer":
            continue
        for dtype in sorted({looked_up, "auto"} if keeps_layers(model, asked) else {looked_up}):
            implied = asked == "auto" != dtype
            kernel = choose(device, _layer(config, model, spec, options), dtype, options.block_size, implied)
            chosen.setdefault(kernel.name, kernel)
            changed = stored_type(kernel, dtype)
            stored = stored if changed == dtype else changed
    layouts = common_layouts(device, chosen.values(), asked)
    if options.block_size is not None:
        return Kernels(_window_block(model, list(chosen.values()), options.block_size), stored, layouts)
    if model.model_type in SPARSE_KEYS:
        chosen["sparse"] = SPARSE_KERNEL
    elif model.indexer_size is not None:
        chosen["indexer"] = indexer_kernel()
    return Kernels(common_block(list(chosen.values())), stored, layouts)


def asked_type(config: Mapping[str, Any], model: Model, option: str) -> str:
    """The type of the cache that the option asks for, or with `auto` the checkpoint, or neither."""
    of_file = quantized_cache(decoder_fields(config), model.latent_sizes is not None) if option == "auto" else None
    return option if of_file is None else of_file[0]


def _types(config: Mapping[str, Any], model: Model, device: Device, asked: str) -> tuple[str, str]:
    """The type that a model is read with, and the one that vLLM asks its kernels about."""
    read, asked = asked, asked_type(config, model, asked)
    if asked == "auto" and model.model_type == "glm_moe_dsa" and device.capability[0] == 10:
        return "fp8_e4m3", "fp8_e4m3"  # vLLM 0.33 `GlmMoeDsaForCausalLM`
    if asked.startswith("turboquant_") and model.model_type in UNLISTED:
        raise ConfigError(
            "kv_cache_dtype", asked, f"another: vLLM cannot tell which layers of {model.model_type} attend"
        )
    packed = asked.startswith("turboquant_") or asked.endswith("_per_token_head") or asked == "nvfp4_4over6"
    if model.model_type in SPARSE_KEYS and (packed or (asked == "nvfp4" and device.capability[0] != 10)):
        raise ConfigError("kv_cache_dtype", asked, "auto or 8-bit floats, with layers of picked keys and values")
    if asked.endswith("_per_token_head") and any(_uneven(spec) for spec in model.attention_specs):
        raise ConfigError("kv_cache_dtype", asked, "another packing: keys and values differ in size")
    if asked == "float32" or (asked == "bfloat16" and model.model_type == "deepseek_v32"):
        return read, "auto"
    return read, asked


def _uneven(spec: AttentionSpec) -> bool:
    return not spec.latent and spec.value_size != spec.head_size


def _layer(config: Mapping[str, Any], model: Model, spec: AttentionSpec, options: EngineOptions) -> AttentionLayer:
    """A layer as the selector is asked about it."""
    fields = decoder_fields(config)
    queries = _size(fields, "num_attention_heads") // options.tensor_parallel_size
    split = options.decode_context_parallel_size > 1
    if spec.latent and model.latent_sizes is not None:
        rank, rope = model.latent_sizes
        sizes = {"rank": rank, "rope": rope, "queries": queries}
        sizes["nope"] = _size(fields, "qk_nope_head_dim") or NOPE_SIZES.get(model.model_type, 128)
        sizes |= {"topk": _size(fields, "index_topk"), "sparse": int(model.indexer_size is not None), "dcp": int(split)}
        return AttentionLayer(spec.head_size, latent=sizes)
    flags = {
        "sink": model.model_type in WITH_SINKS,
        "images": reads_ahead(config),
        "window": spec.slides,
        "dcp": split,
        "grouped": queries > spec.num_kv_heads,
        "cross": bool(spec.encoder_tokens),
    }
    if flags["cross"]:
        flags = dict.fromkeys(flags, False) | {"cross": True, "grouped": flags["grouped"]}
    sizes = {each.head_size for each in model.attention_specs}
    several = model.model_type.startswith("gemma4") and len(sizes) > 1
    only, newer = None, device_of(options.device).capability[0] in (9, 10)
    if _uneven(spec):  # vLLM 0.33 `MiMoV2Attention` names one of the two kernels for such layers itself
        only = "FLASH_ATTN" if newer else "TRITON_ATTN"
    elif several and not newer:  # vLLM 0.33 `Gemma4Config`
        only = "TRITON_ATTN"
    return AttentionLayer(spec.head_size, frozenset(name for name, has in flags.items() if has), only=only)


def _size(fields: Any, name: str) -> int:
    """A size that the config or its family states, or 0."""
    value = fields.integer(name).value if name in fields.family.fields else fields.values.get(name)
    return value if isinstance(value, int) else 0


def _window_block(model: Model, chosen: list[Kernel], block_size: int) -> int:
    """Tokens per block of a model of windows alone, whose layers choose their own (vLLM 0.33 `get_kv_cache_spec`).

    They take the largest block of their kernels that the asked one holds. Beside full attention such blocks are joined
    to the asked size again.
    """
    windows = all(spec.attends and kinds.layer(spec).seeks_run for spec in model.specs.values())
    return chosen[0].largest(block_size) if windows else block_size


def gdn_prefill(config: Mapping[str, Any], device: Device, backend: str | None) -> str:
    """Kernel for prompts of gated delta nets on a device (vLLM 0.33 `_resolve_gdn_prefill_backend`, with CUDA 13).

    FlashInfer's on Hopper, and on Blackwell for keys of 128 elements; where it cannot be had, and for any other than
    it, one that leaves no state inside a chunk.
    """
    major, minor = device.capability
    keys = decoder_fields(config).values.get("linear_key_head_dim", FLASHINFER_KEYS)
    able = (major, minor) == (9, 0) or (major in (10, 12) and keys == FLASHINFER_KEYS)
    return "flashinfer" if backend in (None, "flashinfer") and able else "triton"


def kda_prefill(device: Device, backend: str) -> str:
    """Kernel for prompts of Kimi delta attention with bounded gates on a device (vLLM 0.33 `is_flashkda_supported`)."""
    able = device.capability[0] in (9, 10, 12)
    if backend == "flashkda" and not able:
        raise ConfigError("kda_prefill_backend", backend, f"auto or triton on {device.name}")
    return "flashkda" if able and backend != "triton" else "triton"

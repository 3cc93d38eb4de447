"""Attention kernels of a model on a device, what follows from them, and what vLLM 0.33 refuses of a model."""

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
from hkv.dialects.vllm.planning.speculation import Speculation
from hkv.errors import ConfigError
from hkv.model.huggingface import Model
from hkv.model.huggingface.common_fields import LENGTHS, quantization_method, quantized_cache, served_dtype
from hkv.model.huggingface.family import words
from hkv.model.huggingface.reading import decoder_fields
from hkv.spec import AttentionSpec, attention_of, is_latent

FLASHINFER_KEYS = 128
"""Elements of a key that FlashInfer's kernels for gated delta nets take on Blackwell."""

WITH_SINKS = ("gpt_oss", "mimo_v2", "mimo_v2_flash")
"""Types whose layers have learned sinks."""

OWN_KERNELS = ("deepseek_v4", "dots3_note", "inkling_text")
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
    if model.model_type == "dots3_note" and device.capability[0] != 9:
        raise ConfigError("device", device.name, "a Hopper GPU, for which alone vLLM 0.33 has kernels of dots3_note")
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
    return not is_latent(spec) and spec.value_size != spec.head_size


def _layer(config: Mapping[str, Any], model: Model, spec: AttentionSpec, options: EngineOptions) -> AttentionLayer:
    """A layer as the selector is asked about it."""
    fields = decoder_fields(config)
    queries = _size(fields, "num_attention_heads") // options.tensor_parallel_size
    split = options.decode_context_parallel_size > 1
    if is_latent(spec) and model.latent_sizes is not None:
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
    windows = all(attention_of(spec) and kinds.layer(spec).seeks_run for spec in model.specs.values())
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


# Lengths and parallel shapes that vLLM 0.33 refuses of a model (`ModelConfig`, `ParallelConfig`).

REACHING = ("default", "linear", "llama3", "ntk", "proportional")
"""Kinds of rotary scaling that a longer table leaves as they are (vLLM 0.33 `_CACHE_ONLY_ROPE_TYPES`)."""

EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Fields that state the number of experts, in the order in which vLLM 0.33 looks for them (`CONFIG_FIELD_ALIASES`)."""

WITH_EXPERTS = words(
    """
    afmoe aria_text axk1 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 doge dots1
    ernie4_5_moe ernie4_5_vl_moe_text exaone_moe flex_olmo glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa gpt_oss
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling_text jamba jetmoe
    kimi_linear kolibri1 laguna lfm2_moe llama4_text longcat_flash mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text
    mistral4 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_text
    qwen3_vl_moe_text qwen4_exp_text solar_open step3p5 zaya
    """
)
"""Types whose config class (transformers 5.20, vLLM 0.33) has experts where a file does not say."""

WITHOUT_STAGES = ("gemma3n_text", "whisper", "cohere_asr", "nemotron_parse")
"""Types whose model classes cannot be cut into stages (vLLM 0.33 `SupportsPP`)."""


def check_length(config: Mapping[str, Any], model: Model, options: EngineOptions) -> None:
    """Makes sure that the model takes requests as long as asked (vLLM 0.33 `_get_and_verify_max_len`).

    Rotary positions that are scaled for long requests only (`longrope`) begin with short ones by default, and may be
    asked for all.
    """
    asked = options.max_model_len
    if asked is None or 0 <= asked <= model.max_model_len:
        return
    fields = decoder_fields(config)
    if all(fields.values.get(name) is None and fields.family.fields.get(name) is None for name in LENGTHS):
        if asked == -1:
            raise ConfigError("max_model_len", "auto", "a number of tokens: the config does not bound a request")
        return
    if asked == -1:
        return
    lengths = [model.max_model_len, fields.values.get("model_max_length")]
    if "longrope" in str(fields.values.get("rope_scaling") or fields.values.get("rope_parameters")):
        lengths.append(fields.values.get("max_position_embeddings"))
    longest = max(length for length in lengths if isinstance(length, int))
    if asked > longest:
        raise ConfigError("max_model_len", asked, f"at most {longest}, as the model's config has it")


def check_float_cache(config: Mapping[str, Any], options: EngineOptions) -> None:
    """Makes sure that a cache of floats has the model's own (vLLM 0.33 `_reject_mismatched_float_kv_cache`)."""
    asked = options.kv_cache_dtype
    if asked not in ("float32", "float16", "bfloat16"):
        return
    own = options.dtype or served_dtype(decoder_fields(config))[0]
    if asked == "float32" or asked != own:
        expected = "auto" if own == "float32" else f"auto or {own}, the model's own"
        raise ConfigError("kv_cache_dtype", asked, expected)


def shares_positions(config: Mapping[str, Any], speculation: Speculation | None) -> bool:
    """True if a draft's rotary positions reach as far as the target's (vLLM 0.33 `draft_shares_target_positions`)."""
    if speculation is not None and speculation.method == "draft_model":
        return False
    values = decoder_fields(config).values
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    parts = [part for part in scaling.values() if isinstance(part, Mapping)] or [scaling]
    return all(part.get("rope_type", part.get("type", "default")) in REACHING for part in parts)


def check_parallel(config: Mapping[str, Any], model: Model, options: EngineOptions) -> None:
    """Makes sure that vLLM serves a model on these ranks."""
    if options.pipeline_parallel_size > 1 and model.model_type in WITHOUT_STAGES:
        raise ConfigError("pipeline_parallel_size", options.pipeline_parallel_size, "1: its model class has no stages")
    if options.enable_expert_parallel and not _has_experts(config):
        raise ConfigError(
            "enable_expert_parallel", True, f"false: the config of this {model.model_type} has no experts"
        )
    context, ranks = options.decode_context_parallel_size, options.tensor_parallel_size
    if context > 1 and model.encoder_tokens:
        raise ConfigError("decode_context_parallel_size", context, "1: an encoder's output cannot be split by tokens")
    if context == 1 or model.latent_sizes is not None:
        return
    fields = decoder_fields(config)
    if "num_attention_heads" not in fields.family.fields:
        raise ConfigError("decode_context_parallel_size", context, f"1: {fields.family.name} states no query heads")
    heads, key_heads = fields.integer("num_attention_heads").value, fields.kv_heads.value
    name = "decode_context_parallel_size"
    if any(kinds.layer(spec).vllm_name == "SlidingWindowSpec" for spec in model.specs.values()):
        raise ConfigError(name, context, "1: windows cannot be split by tokens")
    if ranks <= key_heads or context > ranks // key_heads:
        expected = f"1, or with more tensor-parallel ranks: {ranks} share {key_heads} key/value heads"
        raise ConfigError(name, context, expected)
    if heads // key_heads % context:
        raise ConfigError(name, context, f"a divisor of the {heads // key_heads} query heads of a key/value head")


def _has_experts(config: Mapping[str, Any]) -> bool:
    """True if a config states more than 0 experts (vLLM 0.33 `get_num_experts`)."""
    fields = decoder_fields(config)
    values, usual = fields.values, int(fields.model_type in WITH_EXPERTS)
    stated = next((values[name] for name in EXPERTS if values.get(name) is not None), usual)
    if isinstance(stated, list):  # one number a modality
        stated = next(iter(stated), 0)
    blocks = values.get("block_configs") or ()
    return bool(stated) or any(isinstance(block, Mapping) and block.get("block_type") == "moe" for block in blocks)


# Images, videos and checkpoints in their effect on the cache: sizes of a step, and scales of one-byte caches.

READS_AHEAD = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Types in which tokens of an image read each other (vLLM 0.33 `MM_PREFIX_LM_MODELS`); some of Gemma 4 say so."""

VIDEO = 32 * (70 + 2 + 6)
"""Tokens of Gemma 4's longest video: frames, of their soft tokens, two marks and a time (vLLM 0.33 `gemma4_mm`)."""

WITH_SCALES = ("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed")
"""Quantizations whose checkpoints may have scales of a cache in eight-bit floats of four exponent bits."""


def least_step_tokens(config: Mapping[str, Any]) -> int:
    """Tokens that a step has by default at least, so that the largest image or video is in one (vLLM 0.33)."""
    return VIDEO if config.get("model_type") == "gemma4" and reads_ahead(config) else 0


def reads_ahead(config: Mapping[str, Any]) -> bool:
    """True if tokens of an image read those behind them (vLLM 0.33 `is_mm_prefix_lm`)."""
    if config.get("model_type") == "gemma4":
        return decoder_fields(config).values.get("use_bidirectional_attention") == "vision"
    return config.get("model_type") in READS_AHEAD


def check_scales(config: Mapping[str, Any], kv_cache_dtype: str) -> None:
    """Makes sure that a checkpoint goes with eight-bit floats of five exponent bits: its scales are for four."""
    if kv_cache_dtype != "fp8_e5m2":
        return
    quantization = config.get("quantization_config") or {}
    method = quantization_method(quantization) if isinstance(quantization, Mapping) else None
    scheme = method == "compressed-tensors" and quantization.get("kv_cache_scheme") is not None
    if scheme or method in WITH_SCALES:
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"another with a checkpoint in {method}")

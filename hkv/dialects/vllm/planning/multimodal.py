"""Images, videos and checkpoints in their effect on the cache: sizes of a step, and kernels for one-byte caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.planning.devices import Device
from hkv.errors import ConfigError
from hkv.model.huggingface import Model
from hkv.model.huggingface.reading import decoder_fields

READS_AHEAD = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Types in which tokens of an image read each other (vLLM 0.33 `MM_PREFIX_LM_MODELS`); some of Gemma 4 say so."""

VIDEO = 32 * (70 + 2 + 6)
"""Tokens of Gemma 4's longest video: frames, of their soft tokens, two marks and a time (vLLM 0.33 `gemma4_mm`)."""

WITH_SINKS = ("gpt_oss", "mimo_v2", "mimo_v2_flash")
"""Types with learned sinks, for which FlashInfer's kernels need Blackwell."""

FLASHINFER_HEADS = (64, 128, 256, 512)
"""Elements of a head that FlashInfer's kernels take."""

WITH_SCALES = ("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed")
"""Quantizations whose checkpoints may have scales of a cache in eight-bit floats of four exponent bits."""


def least_step_tokens(config: Mapping[str, Any]) -> int:
    """Tokens that a step has by default at least, so that the largest image or video is in one (vLLM 0.33).

    Args:
      config: the model's `config.json`.
    """
    return VIDEO if config.get("model_type") == "gemma4" and _reads_ahead(config) else 0


def _reads_ahead(config: Mapping[str, Any]) -> bool:
    """True if tokens of an image read those behind them (vLLM 0.33 `is_mm_prefix_lm`)."""
    if config.get("model_type") == "gemma4":
        return decoder_fields(config).values.get("use_bidirectional_attention") == "vision"
    return config.get("model_type") in READS_AHEAD


def check_one_byte_cache(config: Mapping[str, Any], model: Model, device: Device, kv_cache_dtype: str) -> None:
    """Makes sure that kernels and checkpoint go with a cache of eight-bit floats.

    GPUs without such floats (before Ada and Hopper) have FlashInfer's kernels for them only, and those of others for
    five exponent bits, but none of them for sinks. A checkpoint with scales has them for four.

    Args:
      config: the model's `config.json`.
      model: the model, as read from it.
      device: the GPU.
      kv_cache_dtype: the cache's element type or packing.

    Raises:
      ConfigError: they do not (vLLM 0.33 `TritonAttentionImpl`, `_init_kv_cache_quant`).
    """
    if kv_cache_dtype == "fp8_e5m2":
        quantization = config.get("quantization_config") or {}
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        scheme = method == "compressed-tensors" and quantization.get("kv_cache_scheme") is not None
        if scheme or method in WITH_SCALES:
            raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"another with a checkpoint in {method}")
    if device.capability >= (8, 9) or kv_cache_dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return
    if kv_cache_dtype == "fp8_e5m2" and model.model_type not in WITH_SINKS:
        return
    heads = {spec.head_size for spec in model.attention_specs}
    several = model.model_type.startswith("gemma4") and len(heads) > 1  # vLLM 0.33 `Gemma4Config` leaves it to Triton
    if several or _reads_ahead(config) or model.model_type in WITH_SINKS or not heads <= set(FLASHINFER_HEADS):
        expected = f"another on {device.name}: only Triton's kernels take this model, and these floats need more"
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, expected)

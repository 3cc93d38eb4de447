"""Images, videos and checkpoints in their effect on the cache: sizes of a step, and scales of one-byte caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.reading import decoder_fields
from hkv.model.huggingface.served_dtype import quantization_method

READS_AHEAD = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Types in which tokens of an image read each other (vLLM 0.33 `MM_PREFIX_LM_MODELS`); some of Gemma 4 say so."""

VIDEO = 32 * (70 + 2 + 6)
"""Tokens of Gemma 4's longest video: frames, of their soft tokens, two marks and a time (vLLM 0.33 `gemma4_mm`)."""

WITH_SCALES = ("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed")
"""Quantizations whose checkpoints may have scales of a cache in eight-bit floats of four exponent bits."""


def least_step_tokens(config: Mapping[str, Any]) -> int:
    """Tokens that a step has by default at least, so that the largest image or video is in one (vLLM 0.33).

    Args:
      config: the model's `config.json`.
    """
    return VIDEO if config.get("model_type") == "gemma4" and reads_ahead(config) else 0


def reads_ahead(config: Mapping[str, Any]) -> bool:
    """True if tokens of an image read those behind them (vLLM 0.33 `is_mm_prefix_lm`)."""
    if config.get("model_type") == "gemma4":
        return decoder_fields(config).values.get("use_bidirectional_attention") == "vision"
    return config.get("model_type") in READS_AHEAD


def check_scales(config: Mapping[str, Any], kv_cache_dtype: str) -> None:
    """Makes sure that a checkpoint goes with eight-bit floats of five exponent bits: its scales are for four.

    Args:
      config: the model's `config.json`.
      kv_cache_dtype: the cache's element type or packing.

    Raises:
      ConfigError: it does not (vLLM 0.33 `_init_kv_cache_quant`).
    """
    if kv_cache_dtype != "fp8_e5m2":
        return
    quantization = config.get("quantization_config") or {}
    method = quantization_method(quantization) if isinstance(quantization, Mapping) else None
    scheme = method == "compressed-tensors" and quantization.get("kv_cache_scheme") is not None
    if scheme or method in WITH_SCALES:
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"another with a checkpoint in {method}")

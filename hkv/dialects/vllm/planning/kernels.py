"""Tokens per block that the attention kernels of a device want (vLLM 0.33 `Platform.update_block_size_for_backend`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.planning.devices import Device
from hkv.errors import ConfigError
from hkv.model.huggingface import Model
from hkv.model.huggingface.reading import decoder_fields

LATENT_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")
"""Values of `--kv-cache-dtype` that a backend for latent attention takes."""

FLASHINFER_BLOCKS = (16, 32, 64)
"""Tokens of the blocks that FlashInfer's kernels take."""

FLASHINFER_KEYS = 128
"""Elements of a key that FlashInfer's kernels for gated delta nets take on Blackwell."""

SPARSE_FROM = 9
"""Major compute capability of the first GPUs with kernels for latent attention with an indexer (vLLM 0.33)."""

ONE_BYTE = ("fp8", "fp8_e4m3")


def preferred_block_size(model: Model, device: Device, kv_cache_dtype: str) -> int | None:
    """Tokens per block that vLLM's first choice of kernels on a device wants; None for what the model was read with.

    Latent attention without an index: FLASH_ATTN_MLA (16) on compute capability 9, FLASHMLA (64) there for one-byte
    caches, FLASHINFER_MLA (32) on 10, TRITON_MLA (16) elsewhere. Heads of 512 elements in one-byte caches:
    FlashAttention 4 (64) on capability 9. The order is that of `vllm.platforms.cuda._get_backend_priorities`.

    Args:
      model: the model, as read.
      device: the GPU.
      kv_cache_dtype: the cache's element type or packing.
    """
    specs = model.attention_specs
    major = device.capability[0]
    if model.latent_sizes is not None and model.indexer_size is None:
        if any(not spec.latent for spec in specs):
            return None
        if major == 9:
            return 64 if kv_cache_dtype in ONE_BYTE else 16
        return 32 if major == 10 else 16
    heads = max((spec.head_size for spec in specs), default=0)
    if major == 9 and kv_cache_dtype in ONE_BYTE and heads == 512 and model.latent_sizes is None:
        return 64
    return None


def window_block_size(model: Model, device: Device, kv_cache_dtype: str, block_size: int) -> int:
    """Tokens per block of a model of windows alone, whose layers choose their own (vLLM 0.33 `get_kv_cache_spec`).

    They take the largest block of their kernels that the asked one holds: before Hopper, FlashInfer serves one-byte
    caches, in blocks of 16, 32 or 64. Beside full attention such blocks are joined to the asked size again.

    Args:
      model: the model, as read with the asked size.
      device: the GPU.
      kv_cache_dtype: the cache's element type or packing.
      block_size: tokens asked for.
    """
    windows = all(spec.attends and spec.seeks_run for spec in model.specs.values())
    if not windows or kv_cache_dtype not in ("fp8", "fp8_e4m3") or device.capability >= (9, 0):
        return block_size
    return max((size for size in FLASHINFER_BLOCKS if size <= block_size), default=FLASHINFER_BLOCKS[0])


def gdn_prefill(config: Mapping[str, Any], device: Device, backend: str | None) -> str:
    """Kernel for prompts of gated delta nets on a device (vLLM 0.33 `_resolve_gdn_prefill_backend`, with CUDA 13).

    FlashInfer's on Hopper, and on Blackwell for keys of 128 elements; where it cannot be had, and for any other than
    it, one that leaves no state inside a chunk.

    Args:
      config: the model's `config.json`.
      device: the GPU.
      backend: the kernel that was asked for, or None.
    """
    major, minor = device.capability
    keys = decoder_fields(config).values.get("linear_key_head_dim", FLASHINFER_KEYS)
    able = (major, minor) == (9, 0) or (major in (10, 12) and keys == FLASHINFER_KEYS)
    return "flashinfer" if backend in (None, "flashinfer") and able else "triton"


def kda_prefill(device: Device, backend: str) -> str:
    """Kernel for prompts of Kimi delta attention with bounded gates on a device (vLLM 0.33 `is_flashkda_supported`).

    Args:
      device: the GPU.
      backend: the kernel that was asked for, or `auto`.

    Raises:
      ConfigError: FlashKDA was asked for, and the device has none.
    """
    able = device.capability[0] in (9, 10, 12)
    if backend == "flashkda" and not able:
        raise ConfigError("kda_prefill_backend", backend, f"auto or triton on {device.name}")
    return "flashkda" if able and backend != "triton" else "triton"


def check_cache_dtype(model: Model, device: Device, kv_cache_dtype: str) -> None:
    """Makes sure that some backend of the device takes the element type for such layers.

    Raises:
      ConfigError: none does.
    """
    if kv_cache_dtype.startswith("nvfp4") and not kv_cache_dtype.endswith("_ds_mla") and device.capability[0] != 10:
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"another on {device.name}: it needs a B200 or its like")
    if model.latent_sizes is not None and model.indexer_size is not None and device.capability[0] < SPARSE_FROM:
        raise ConfigError("device", device.name, "Hopper or Blackwell, with kernels for sparse latent attention")
    attends = any(spec.attends for spec in model.specs.values())
    if kv_cache_dtype == "fp8_per_token_head" and attends and device.capability < (8, 9):
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"another on {device.name}, which has no 8-bit floats")
    if model.latent_sizes is not None and kv_cache_dtype in ONE_BYTE and device.capability < (8, 9):
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"another on {device.name}, for latent attention")
    if model.latent_sizes is not None and kv_cache_dtype not in LATENT_TYPES:
        expected = f"one of {', '.join(LATENT_TYPES)}, with latent attention"
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, expected)

"""vLLM 0.33's Triton writers under test, in Triton's interpreter, on a CPU.

    hkv check-kernel examples/kernels/vllm_writers.py:reshape_and_cache_flash --draws 100

What the platform says of a GPU is stood in for: the interpreter is told that it is one of compute capability 9.0.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # else vLLM, which finds no driver, takes Triton for absent

import torch

from hkv.testing.kernels import kernel

CAPABILITY = (9, 0)


@functools.cache
def _module() -> Any:
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as module

    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    return module


def _scale(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float32)


@kernel("write", dtypes=("bfloat16", "float16", "float32"), lacks=("two sizes", "tensor scales"))
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`triton_reshape_and_cache_flash`: caches `[blocks, slots, heads, elements]` of any strides."""
    one = _scale(1.0)
    _module().triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", one, one)


@kernel("write", dtypes=("bfloat16", "float16", "float32"), layouts=("LBHNC", "LBNHC", "LHBNC", "B*C"))
def reshape_and_cache_flash_diffkv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`triton_reshape_and_cache_flash_diffkv`: keys and values of two sizes in one cell."""
    one = _scale(1.0)
    _module().triton_reshape_and_cache_flash_diffkv(key, value, kv_cache, slot_mapping, "auto", one, one)


@kernel("write", contents=("int8 with scales",), layouts=("BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC"))
def reshape_and_cache_per_token_head(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale_cache: torch.Tensor,
    value_scale_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`triton_reshape_and_cache_flash_per_token_head_quant`: int8, and a scale for each token and head.

    Not LHBNC: there the kernel's int32 product of a head and its stride overflows in pools of more than 2^31 elements.
    """
    if key.dtype == torch.int8:
        raise NotImplementedError("content that is int8 already")
    from vllm.v1.kv_cache_interface import KVQuantMode

    _module().triton_reshape_and_cache_flash_per_token_head_quant(
        key, value, key_cache, value_cache, key_scale_cache[..., 0], value_scale_cache[..., 0], slot_mapping,
        KVQuantMode.INT8_PER_TOKEN_HEAD,
    )  # fmt: skip

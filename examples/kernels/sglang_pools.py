"""SGLang 0.5.23's token pools under test, on a CPU.

hkv check-kernel examples/kernels/sglang_pools.py:set_kv_buffer
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which wants a GPU otherwise

import torch

from hkv.testing.kernels import kernel

FLOATS = ("bfloat16", "float16", "float32")


@functools.cache
def _pools() -> Any:
    from hkv.dialects.sglang.engines import sglang_objects  # stands in for what SGLang only imports

    del sglang_objects
    runner: Any = types.ModuleType("runner")  # of all that it imports, the writer asks one question
    runner.get_is_capture_mode = lambda: False
    sys.modules.setdefault("sglang.srt.model_executor.runner", runner)
    from sglang.srt.mem_cache import memory_pool

    return memory_pool


def _pool(key_cache: torch.Tensor, value_cache: torch.Tensor, page_size: int, by_head: bool) -> Any:
    """A pool over buffers that are there already; `set_kv_buffer` and `move_kv_cache` are its own."""
    pool = object.__new__(_pools().MHATokenToKVPool)
    slots = key_cache.shape[0] * (page_size if by_head else 1)
    fields = {
        "size": slots - page_size, "page_size": page_size, "dtype": key_cache.dtype, "store_dtype": key_cache.dtype,
        "use_hnd": by_head, "kv_cache_layout": "hnd" if by_head else "nhd", "start_layer": 0, "layer_num": 1,
        "k_buffer": [key_cache], "v_buffer": [value_cache], "head_dim": key_cache.shape[-1], "alt_stream": None,
        "v_head_dim": value_cache.shape[-1], "device_module": None, "_kv_copy_config": None,
        "use_native_move_kv_cache": True, "k_scale_buffer": None, "native_k_scale_buffer": None, "device": "cpu",
        "quant_method": _pools().UnquantizedKVCacheMethod(),
    }  # fmt: skip
    fields["row_dim"] = key_cache.shape[-2 if not by_head else 1] * key_cache.shape[-1]
    fields["v_row_dim"] = value_cache.shape[-2 if not by_head else 1] * value_cache.shape[-1]
    vars(pool).update(fields)
    return pool


LAYER = types.SimpleNamespace(layer_id=0)


@kernel("write", axes="SHD", dtypes=FLOATS, lacks=("padding tokens", "tensor scales"))
def set_kv_buffer(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kernel_block_size: int,
) -> None:
    """`MHATokenToKVPool.set_kv_buffer`, slots in rows; padding goes to page 0 there."""
    _pool(key_cache, value_cache, kernel_block_size, False).set_kv_buffer(LAYER, slot_mapping, key, value)


@kernel("write", axes="BHND", dtypes=FLOATS, lacks=("padding tokens", "tensor scales"))
def set_kv_buffer_by_head(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kernel_block_size: int,
) -> None:
    """The same where `SGLANG_USE_HND_KVCACHE` asks for heads before slots."""
    _pool(key_cache, value_cache, kernel_block_size, True).set_kv_buffer(LAYER, slot_mapping, key, value)


@kernel("write", axes="SD", contents=("latent",), dtypes=FLOATS, lacks=("tensor scales",))
def set_mla_kv_buffer_naive(latent: torch.Tensor, latent_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`set_mla_kv_buffer_naive`: a latent and its rotary part, with -1 for the slot that is skipped."""
    from sglang.kernels.ops.kvcache import mla_buffer

    rope = max(1, latent.shape[-1] // 3)
    if latent.shape[-1] == 1:
        raise NotImplementedError("latents of one element")
    own = {"reserved_skip_index": -1, "dcp_world_size": 1, "dcp_rank": 0}
    mla_buffer.set_mla_kv_buffer_naive(
        latent_cache, slot_mapping, latent[..., :-rope].contiguous(), latent[..., -rope:].contiguous(), **own
    )


@kernel("copy_blocks", axes="SHD", dtypes=FLOATS, lacks=("padding tokens",))
def move_kv_cache(
    key_caches: torch.Tensor,
    value_caches: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    block_size: int,
) -> None:
    """`MHATokenToKVPool.move_kv_cache` as plain torch (`SGLANG_NATIVE_MOVE_KV_CACHE`), of all slots of each block."""
    pool = _pool(key_caches[0], value_caches[0], block_size, False)
    pool.k_buffer, pool.v_buffer, pool.layer_num = list(key_caches), list(value_caches), len(key_caches)
    inside = torch.arange(block_size)
    to, source = ((ids.long()[:, None] * block_size + inside).flatten() for ids in (targets, sources))
    pool.move_kv_cache(to, source)

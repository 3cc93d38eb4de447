"""The engines' own kernels as the benchmark calls them: LMCache's bytes are HKV's, and vLLM's takes these arguments."""

from __future__ import annotations

import inspect
import math

import pytest

from benchmarks.engine_kernels import LMCacheTransfer
from hkv.chunks.formats import EngineKVFormat
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.chunks.transfer import Transfer

GEOMETRIES = [
    PageGeometry(EngineKVFormat(1), 2, 3, 40, 4, 2, 8, "bfloat16"),
    PageGeometry(EngineKVFormat(3), 1, 2, 24, 8, 1, 36, "bfloat16"),
    PageGeometry(EngineKVFormat(12), 1, 3, 40, 4, 2, 16, "float16"),
]
BLOCKS = 3
"""Blocks of an object."""


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", ["pack", "unpack"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: f"format {int(geometry.format)}")
def test_lmcache_moves_the_same_bytes(geometry, operation):
    rows = BLOCKS * geometry.slots
    shape = (geometry.kv_size, geometry.num_layers, rows, geometry.num_heads * geometry.head_size)
    region = Region(0, 0, rows, shape, geometry.dtype, math.prod(shape) * geometry.item_bytes)
    LMCacheTransfer(operation, Transfer(geometry, region)).verify()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_writes_with_these_arguments():
    from vllm import _custom_ops

    expected = ["key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"]
    assert list(inspect.signature(_custom_ops.reshape_and_cache_flash).parameters) == expected

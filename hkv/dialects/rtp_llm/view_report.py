"""Pools and views of a planned cache as plain values, for `hkv plan --json`."""

from __future__ import annotations

from typing import Any

from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.layout.layer_cache import LayerCache
from hkv.layout.strided import StridedView


def view_report(cache: PlannedCache) -> dict[str, Any]:
    """Bytes of each pool, and each layer's views: their pool, first byte, shape and strides in bytes."""
    groups = [group for groups in (cache.plan.groups, *cache.plan.modules) for group in groups]
    layers = sorted({layer for group in groups for layer in group.layers})
    return {
        "pool_bytes": list(cache.pool_sizes),
        "layer_caches": {str(layer): [_cache(found) for found in cache.layer_cache_groups(layer)] for layer in layers},
    }


def _cache(found: LayerCache) -> dict[str, Any]:
    return {
        "tag": found.tag,
        "pool": found.pool,
        "tokens_per_block": found.tokens_per_block,
        "kernel_blocks": found.kernel_blocks,
        "kv": _view(found.kv),
        "scale": None if found.scale is None else _view(found.scale),
        "parts": {name: _view(part) for name, part in found.parts.items()},
    }


def _view(view: StridedView) -> dict[str, Any]:
    return {
        "offset": view.offset,
        "shape": list(view.shape),
        "strides": list(view.strides),
        "dtype": view.dtype,
    }

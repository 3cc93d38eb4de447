"""From a description to bytes: every view of a planned cache against a walk through its pools, byte by byte."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.layout.strided import StridedView
from hkv.layout.views import numpy as numpy_views
from reference.dialects.rtp_llm.pool_walk import walk_pools
from tests.rtp_llm.described import Case, attention, cases, one


def unravelled(view: StridedView, element: Any, kernel_blocks: int) -> tuple[int, ...]:
    """The index of a walked element in the view of its part."""
    shape, place, index = view.shape[3:], element.place, []
    for extent in reversed(shape):
        place, at = divmod(place, extent)
        index.append(at)
    return (element.block * kernel_blocks + element.row, element.head, element.state, *reversed(index))


@given(cases)
@settings(max_examples=30)
def test_every_element_is_where_a_walk_finds_it(case: Case) -> None:
    cache = case.cache
    views: dict[tuple[int, str], Any] = {}
    counted: dict[tuple[int, str, str], int] = {}
    end = [0] * len(cache.pool_sizes)
    for element in walk_pools(cache.plan):
        key = (element.layer, element.tag)
        if key not in views:
            views[key] = cache.layer_cache(*key)
        view = views[key].parts[element.part]
        assert views[key].pool == element.pool
        assert view.address(*unravelled(view, element, views[key].kernel_blocks)) == element.address
        counted[*key, element.part] = counted.get((*key, element.part), 0) + 1
        end[element.pool] = max(end[element.pool], element.address + element.size)
    for (layer, tag), found in views.items():
        assert {part: math.prod(view.shape) for part, view in found.parts.items()} == {
            part: count for (*key, part), count in counted.items() if key == [layer, tag]
        }
    assert all(last <= size for last, size in zip(end, cache.pool_sizes, strict=True))


@given(cases)
@settings(max_examples=25)
def test_a_layers_view_is_all_of_its_blocks_in_order(case: Case) -> None:
    """RTP-LLM's own tensors: rows of axis 0 are kernel blocks, and a block's rows are all of its bytes."""
    cache = case.cache
    pools = [np.random.default_rng(0).integers(0, 256, size, np.uint8) for size in cache.pool_sizes]
    for group in (group for groups in (cache.plan.groups, *cache.plan.modules) for group in groups):
        for layer in group.layers:
            found = cache.layer_cache(layer, group.tag)
            for view, stride, kind in ((found.kv, group.stride, 0), (found.scale, group.scale_stride, 1)):
                if view is None:
                    assert kind == 1
                    assert group.block.scale == 0
                    continue
                seen = numpy_views.view(pools[found.pool], view)
                rows = seen.shape[0] // group.num_blocks
                assert rows == (found.kernel_blocks if kind == 0 or group.block.kind != "opaque_kv" else 1)
                for block in range(group.num_blocks):
                    start = cache.addresses.address(layer, block, group.tag)[kind]
                    assert start is not None
                    raw = seen[block * rows : (block + 1) * rows].tobytes()
                    assert raw == pools[found.pool][start : start + stride].tobytes()


@pytest.mark.torch
@given(cases)
@settings(max_examples=25)
def test_torch_sees_and_writes_the_same_storage(case: Case) -> None:
    import torch

    from hkv.layout.views import torch as torch_views

    cache = case.cache
    pools = [np.random.default_rng(2).integers(0, 256, size, np.uint8) for size in cache.pool_sizes]
    tensors = [torch_views.from_buffer(pool) for pool in pools]
    for group in cache.plan.groups:
        found = cache.layer_cache(group.layers[0], group.tag)
        for view in (found.kv, *found.parts.values(), *([found.scale] if found.scale else [])):
            tensor, seen = torch_views.view(tensors[found.pool], view), numpy_views.view(pools[found.pool], view)
            assert tuple(tensor.shape) == seen.shape
            assert bytes(tensor.contiguous().view(torch.uint8).numpy().ravel()) == seen.tobytes()
        key = found.parts.get("key")
        if key is not None and len(found.kv.shape) == 5:
            torch_views.view(tensors[found.pool], found.kv)[:, 0].view(torch.uint8).fill_(7)
            assert (numpy_views.view(pools[found.pool], key).view(np.uint8) == 7).all()


def test_scales_of_float8_begin_as_one() -> None:
    for dtype, want in (("float8_e4m3fn", 1.0), ("int8", 0.0)):
        described = DescribedModel((one("default", attention(2, 4, dtype)),) * 2)
        cache = PlannedCache.of_layers(described, RtpOptions(block_size=8), num_blocks=3)
        (pool,) = cache.pools()
        for layer in range(2):
            found = cache.layer_cache(layer)
            assert found.scale is not None
            assert (numpy_views.view(pool, found.scale) == want).all()
            assert not numpy_views.view(pool, found.kv).view(np.uint8).any()

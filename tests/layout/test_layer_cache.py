"""RTP-LLM's pools and the views its layers get."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import LayoutError
from hkv.layout.layer_cache import mha_layer, mla_layer, opaque_layer, partition_bytes, stack_regions
from hkv.layout.views import numpy as numpy_views
from reference.layout import layer_cache_addresses


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_addresses_are_those_of_a_walk(strides, num_blocks):
    seen: set[int] = set()
    end = 0
    for region, (layers, kv, scale) in zip(stack_regions(num_blocks, strides), strides, strict=True):
        walked = layer_cache_addresses(layers, num_blocks, kv, region.kv_offset)
        assert walked == {at: region.kv_address(*at) for at in walked}
        assert region.kv_offset == end
        bytes_of = {a + i for a in walked.values() for i in range(kv)}
        if scale:
            scales = layer_cache_addresses(layers, num_blocks, scale, region.scale_offset)
            assert scales == {at: region.scale_address(*at) for at in scales}
            bytes_of |= {a + i for a in scales.values() for i in range(scale)}
        assert not seen & bytes_of
        assert len(bytes_of) == layers * num_blocks * (kv + scale)
        seen |= bytes_of
        end = region.end
    assert seen == set(range(end))


def test_an_mha_layer_alternates_k_and_v_per_kernel_block():
    heads, tokens, size, blocks = 3, 8, 5, 4
    stride = 2 * heads * tokens * size * 2
    (region,) = stack_regions(blocks, [(2, stride, 2 * 4 * heads * tokens)])
    whole = mha_layer(region, 1, tag="full", dtype="float16", heads=heads, head_size=size, tokens=8, kernel_tokens=8)
    split = mha_layer(region, 1, tag="full", dtype="float16", heads=heads, head_size=size, tokens=8, kernel_tokens=2)
    assert (whole.kv.shape, whole.kernel_blocks, whole.tokens_per_block) == ((4, 2, 3, 8, 5), 1, 8)
    assert (split.kv.shape, split.kernel_blocks, split.tokens_per_block) == ((16, 2, 3, 2, 5), 4, 2)
    assert whole.scale is not None
    assert whole.scale.shape == (4, 48)
    assert split.scale is not None
    assert split.scale.shape == (16, 12)
    raw = np.random.default_rng(0).integers(0, 256, region.end, np.uint8)
    a, b = numpy_views.view(raw, whole.kv), numpy_views.view(raw, split.kv)
    for block in range(blocks):
        assert a[block].tobytes() == b[4 * block : 4 * block + 4].tobytes()
        assert (
            region.kv_address(1, block)
            == whole.kv.address(block, 0, 0, 0, 0)
            == split.kv.address(4 * block, 0, 0, 0, 0)
        )
    value = split.kv.address(0, 1, 0, 0, 0) - region.kv_address(1, 0)
    assert value != stride // 2, "the halves of a split block are not K and V"
    assert whole.kv.address(0, 1, 0, 0, 0) - region.kv_address(1, 0) == stride // 2


def test_mla_layers_and_their_indexer():
    """A sparse layer of block 4 with a 256-wide indexer keeps (256 + 8) * 4 = 1056 bytes of it in each block."""
    (region,) = stack_regions(3, [(2, 4 * 576 * 2, 1056)])
    cache = mla_layer(region, 0, tag="full", dtype="bfloat16", tokens=4, kernel_tokens=2)
    assert cache.kv.shape == (6, 2, 576)
    assert cache.scale is not None
    assert (cache.scale.shape, cache.scale.dtype) == ((6, 2, 264), "uint8")
    assert cache.scale.offset == region.scale_address(0, 0)
    fp8 = mla_layer(stack_regions(3, [(2, 64 * 656, 0)])[0], 0, tag="full", dtype="uint8", tokens=64, kernel_tokens=64)
    assert fp8.kv.shape == (3, 64, 656)


def test_k23_opaque_and_state_layers():
    """`[3, 64]` elements of 512 tokens seen by a kernel of 128 are `[12, 16]`; states keep their physical shape."""
    (region,) = stack_regions(3, [(1, 64, 0)])
    opaque = opaque_layer(region, 0, tag="csa_kv", dtype="uint8", tokens=512, kernel_tokens=128)
    assert (opaque.kv.shape, opaque.tokens_per_block, opaque.scale) == ((12, 16), 128, None)
    state = opaque_layer(region, 0, tag="linear", dtype="uint8", tokens=8, kernel_tokens=8)
    assert (state.kv.shape, state.tokens_per_block, state.kernel_blocks) == ((3, 64), 8, 1)


def test_shares_of_heads():
    assert partition_bytes(96, 48, 48, 4, 2, 0) == (0, 24, 48, 24)
    assert partition_bytes(96, 48, 48, 4, 2, 1) == (24, 24, 72, 24)
    assert partition_bytes(90, 60, 30, 3, 3, 2) == (40, 20, 80, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((96, 48, 40, 4, 2, 0), "the bytes of K and V"),
        ((96, 48, 48, 5, 2, 0), "a divisor of 48"),
        ((96, 48, 48, 3, 2, 0), "a multiple of 2"),
        ((96, 48, 48, 4, 2, 2), "a share from 0 to 1"),
        ((96, 48, 48, 4, 0, 0), "a share from 0"),
        ((96, 48, 48, 4, 2, -1), "a share from 0"),
    ],
)
def test_shares_that_do_not_divide(arguments, message):
    with pytest.raises(LayoutError, match=message):
        partition_bytes(*arguments)


def test_what_is_not_there_or_of_another_size_is_refused():
    (region,) = stack_regions(3, [(1, 64, 0)])
    assert region.scale_address(0, 2) is None
    for layer, block in ((1, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(LayoutError, match="a number from 0"):
            region.kv_address(layer, block)
    with pytest.raises(LayoutError, match="positive numbers"):
        stack_regions(10, [(3, 0, 8)])
    with pytest.raises(LayoutError, match="exactly 32"):
        mha_layer(region, 0, tag="full", dtype="float16", heads=2, head_size=2, tokens=2, kernel_tokens=2)
    with pytest.raises(LayoutError, match="a divisor of the block's 6 tokens"):
        mla_layer(region, 0, tag="full", dtype="uint8", tokens=6, kernel_tokens=4)
    with pytest.raises(LayoutError, match="a multiple of 6 bytes"):
        mla_layer(region, 0, tag="full", dtype="uint8", tokens=6, kernel_tokens=6)

"""Bytes of pages, merge rules, types of layers, and how many blocks a request holds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.kinds import is_uniform_type, layer, layer_class
from hkv.errors import SpecError
from hkv.spec import (
    ChunkedLocal,
    FullAttention,
    HiddenState,
    KernelPages,
    LayerSpec,
    Mamba,
    MergeError,
    MLAAttention,
    OpaqueState,
    RequestLimits,
    SlidingWindow,
    SlidingWindowMLA,
)

FULL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)
WINDOW = SlidingWindow(block_size=16, num_kv_heads=2, head_size=64, window=40)
LATENT = MLAAttention(block_size=16, head_size=576)
LIMITS = RequestLimits(max_model_len=1000, max_in_flight_tokens=100)


@pytest.mark.parametrize(
    ("spec", "page"),
    [
        (FULL, 2 * 16 * 2 * 64 * 2),
        (dataclasses.replace(FULL, head_size_v=32), 2 * 16 * (64 + 32) * 2),
        (dataclasses.replace(FULL, state_content_bytes=136), 2 * 16 * 136),
        (dataclasses.replace(FULL, num_head_slots=4), 4 * 16 * 2 * 64 * 2),
        (dataclasses.replace(FULL, page_size_padded=10000), 10000),
        (LATENT, 16 * 576 * 2),
        (dataclasses.replace(LATENT, tokens_per_state=4), 4 * 576 * 2),
        (
            MLAAttention(block_size=256, head_size=512, state_content_bytes=584, tokens_per_state=4, alignment=576),
            37440,
        ),
        (SlidingWindowMLA(block_size=4, head_size=2048, dtype="float32", window=8, alignment=576), 32832),
        (Mamba(block_size=999, shapes=((3, 8192), (32, 128, 128)), dtypes=("bfloat16", "bfloat16")), 1097728),
        (OpaqueState(block_size=8, entry_bytes=100), 800),
    ],
)
def test_page_bytes(spec: LayerSpec, page: int) -> None:
    assert spec.page_size_bytes == page
    assert spec.num_heads * spec.num_states * spec.content_bytes == spec.unpadded_page_size_bytes <= page


def test_promoted_layers_of_one_window_merge_with_plain_ones() -> None:
    promoted = dataclasses.replace(FULL, sliding_window=64)
    assert layer_class(FullAttention).merge([FULL, promoted, FULL]) == promoted
    with pytest.raises(MergeError, match="sliding_window"):
        layer_class(FullAttention).merge([promoted, dataclasses.replace(FULL, sliding_window=32)])
    with pytest.raises(MergeError, match="not both"):
        layer_class(FullAttention).merge([promoted, dataclasses.replace(FULL, attention_chunk_size=32)])


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(FULL, head_size=32),
        dataclasses.replace(FULL, dtype="float32"),
        dataclasses.replace(FULL, cp_sharded=True),
        dataclasses.replace(FULL, block_size=32),
        dataclasses.replace(FULL, quantization="fp8_per_tensor"),
        LATENT,
        WINDOW,
    ],
)
def test_full_attention_merges_with_its_equals_only(other: LayerSpec) -> None:
    with pytest.raises(MergeError):
        layer_class(FullAttention).merge([FULL, other])


def test_latent_layers_merge_by_packing_and_role() -> None:
    other = dataclasses.replace(LATENT, non_causal_multi_token_decode=True)
    assert layer_class(MLAAttention).merge([LATENT, other]) == other
    for change in (
        {"cache_dtype": "fp8_ds_mla"},
        {"cache_role": "indexer"},
        {"tokens_per_state": 4},
        {"head_size": 512},
    ):
        with pytest.raises(MergeError):
            layer_class(MLAAttention).merge([LATENT, dataclasses.replace(LATENT, **change)])


def test_other_kinds_merge_when_equal() -> None:
    draft = dataclasses.replace(WINDOW, is_draft=True)
    assert layer_class(SlidingWindow).merge([WINDOW, draft]) == WINDOW
    with pytest.raises(MergeError):
        layer_class(SlidingWindow).merge([WINDOW, dataclasses.replace(WINDOW, window=41)])


def test_latent_windows_of_several_sizes_merge_only_as_a_known_defect() -> None:
    small = SlidingWindowMLA(block_size=4, head_size=64, window=8, quantization="fp8_per_tensor")
    large = dataclasses.replace(small, head_size=128)
    with pytest.raises(MergeError):
        layer_class(SlidingWindowMLA).merge([small, large])
    merged = layer_class(SlidingWindowMLA).merge([small, large], frozenset({"window-latent-merge"}))
    assert merged == dataclasses.replace(small, quantization="none")


def test_types_of_layers() -> None:
    latent_window = SlidingWindowMLA(block_size=16, head_size=64, window=40)
    assert is_uniform_type([FULL, LATENT, dataclasses.replace(FULL, head_size=8)])
    assert not is_uniform_type([FULL, WINDOW])
    assert not is_uniform_type([FULL, dataclasses.replace(FULL, block_size=32)])
    assert not is_uniform_type([FULL, dataclasses.replace(FULL, cp_sharded=True)])
    assert is_uniform_type([WINDOW, latent_window])
    assert not is_uniform_type([latent_window, WINDOW])
    assert not is_uniform_type([ChunkedLocal(block_size=16, chunk=8), ChunkedLocal(block_size=16, chunk=9)])
    states = [Mamba(block_size=8, shapes=((n,),), dtypes=("int8",), page_size_padded=8) for n in (3, 8)]
    assert is_uniform_type(states)


def test_context_parallelism_shortens_what_one_rank_holds() -> None:
    limits = dataclasses.replace(LIMITS, context_parallel=4)
    sharded = dataclasses.replace(FULL, cp_sharded=True)
    assert (layer(sharded).max_request_blocks(limits), layer(sharded).held_blocks(0, 1000, limits)) == (16, 16)
    with pytest.raises(SpecError, match="cp_sharded"):
        layer(dataclasses.replace(WINDOW, cp_sharded=True)).max_request_blocks(limits)


@given(
    kind=st.sampled_from((FULL, WINDOW, ChunkedLocal(block_size=16, chunk=48), LATENT)),
    start=st.integers(0, 999),
    block=st.sampled_from((1, 3, 16)),
    chunk=st.integers(1, 100),
)
def test_held_blocks_are_those_that_cover_what_can_still_be_read(
    kind: LayerSpec, start: int, block: int, chunk: int
) -> None:
    spec, end = dataclasses.replace(kind, block_size=block), min(start + chunk, 1000)
    read = {position // block for n in range(start, end) for position in (*spec.readable(n), n)}
    if not read:
        return
    assert (
        layer(spec).held_blocks(start, end, LIMITS)
        == max(read) - min(read) + 1
        <= layer(spec).max_request_blocks(LIMITS)
    )


def test_alignment_rounds_the_page_up() -> None:
    assert LATENT.page_size_bytes % 576 == 0
    aligned = dataclasses.replace(LATENT, alignment=5000)
    assert aligned.page_size_bytes == 20000
    assert aligned.with_block_size(32).page_size_bytes == 40000


def test_kernel_pages_align_strides() -> None:
    assert dataclasses.replace(FULL, block_stride_alignment=KernelPages(8)).stride_alignment_bytes == 8 * 2 * 64 * 4
    assert dataclasses.replace(FULL, block_stride_alignment=KernelPages(16)).stride_alignment_bytes == 1
    assert dataclasses.replace(FULL, block_stride_alignment=100).stride_alignment_bytes == 100
    with pytest.raises(SpecError, match="block_stride_alignment"):
        MLAAttention(block_size=8, head_size=8, tokens_per_state=4, block_stride_alignment=KernelPages(2))


def test_a_hidden_state_is_managed_like_a_latent() -> None:
    hidden = HiddenState(block_size=16, head_size=4096)
    assert (hidden.kind, layer(hidden).bytes_per_token) == ("mla", 8192)
    assert (SlidingWindowMLA(block_size=4, head_size=8, window=4).kind) == "sliding_window"


def test_limits_are_checked() -> None:
    with pytest.raises(SpecError, match="mamba_mode"):
        RequestLimits(max_model_len=1, mamba_mode="sometimes")
    with pytest.raises(SpecError, match="max_model_len"):
        RequestLimits(max_model_len=0)

"""vLLM's ROCm pages against reshaped buffers, and against the views that an installed vLLM makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import LayoutError
from hkv.layout.resolution import rocm_pages
from hkv.layout.views.numpy import numpy_dtype, view

DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), DTYPES)
def test_every_element_is_where_the_shapes_put_it(
    blocks: int, heads: int, tokens: int, vectors: int, dtype: str
) -> None:
    item = numpy_dtype(dtype).itemsize
    x = 16 // item
    size = vectors * x
    pool = np.random.default_rng(0).integers(0, 256, 2 * blocks * heads * tokens * size * item, np.uint8)
    pages = rocm_pages(num_blocks=blocks, heads=heads, tokens=tokens, head_size=size, dtype=dtype)
    keys, values = pool.reshape(2, -1)
    shaped = keys.reshape(blocks, heads, vectors, tokens, x, item)
    assert view(pool, pages.key).tobytes() == shaped.tobytes()
    of_values = values.reshape(blocks, heads, size, tokens, item)
    assert view(pool, pages.value).tobytes() == of_values.tobytes()
    assert view(pool, pages.key_of_token).tobytes() == shaped.transpose(0, 1, 3, 2, 4, 5).tobytes()
    assert view(pool, pages.value_of_token).tobytes() == of_values.transpose(0, 1, 3, 2, 4).tobytes()
    assert pages.value.end == pool.size
    for token in range(tokens):
        for element in range(size):
            at = pages.key_of_token.address(blocks - 1, heads - 1, token, element // x, element % x)
            block = (blocks - 1) * heads * tokens * size + (heads - 1) * tokens * size
            assert at == (block + (element // x * tokens + token) * x + element % x) * item


def test_keys_of_no_whole_vectors_are_refused() -> None:
    with pytest.raises(LayoutError, match="a multiple of 8, the bfloat16 elements of 16 bytes"):
        rocm_pages(num_blocks=2, heads=1, tokens=16, head_size=100)
    with pytest.raises(LayoutError, match="tokens = 0"):
        rocm_pages(num_blocks=2, heads=1, tokens=0, head_size=64)


@pytest.mark.vllm
def test_an_installed_vllm_makes_the_same_views() -> None:
    import torch
    from vllm.v1.attention.ops.paged_attn import PagedAttention

    from hkv.layout.views import torch as torch_views

    for dtype, blocks, heads, tokens, size in (("bfloat16", 3, 2, 16, 64), ("float32", 1, 3, 5, 8)):
        pages = rocm_pages(num_blocks=blocks, heads=heads, tokens=tokens, head_size=size, dtype=dtype)
        raw = torch.arange(pages.value.end, dtype=torch.int32).to(torch.uint8)
        cache = raw.view(getattr(torch, dtype)).view(2, blocks, tokens * heads * size)
        for mine, theirs in zip(
            (pages.key, pages.value), PagedAttention.split_kv_cache(cache, heads, size), strict=True
        ):
            seen = torch_views.view(raw, mine)
            assert (seen.shape, seen.stride(), seen.data_ptr()) == (theirs.shape, theirs.stride(), theirs.data_ptr())

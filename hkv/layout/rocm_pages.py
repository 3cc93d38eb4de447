"""Pages of vLLM's ROCm paged attention: keys cut into vectors of 16 bytes, values with tokens innermost.

The buffer is `[2, blocks, block]`, all keys before all values (vLLM 0.33 `PagedAttention.split_kv_cache`). A block of
keys is `[heads, head size / x, tokens, x]`, x elements being 16 bytes; one of values `[heads, head size, tokens]`. No
token lies in one piece, so that nothing flattens to slots without a copy.
"""

from __future__ import annotations

from typing import NamedTuple

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView
from hkv.limits import MAX_BLOCKS, MAX_TOKENS, check_whole
from hkv.spec.dtypes import item_bytes

VECTOR_BYTES = 16
"""Bytes of a key that one access reads."""


class RocmPages(NamedTuple):
    """One layer's keys and values, as the kernels see them and token by token. The same bytes twice.

    Attributes:
      key: `[blocks, heads, head_size / x, tokens, x]`.
      value: `[blocks, heads, head_size, tokens]`.
      key_of_token: the keys as `[blocks, heads, tokens, head_size / x, x]`.
      value_of_token: the values as `[blocks, heads, tokens, head_size]`.
    """

    key: StridedView
    value: StridedView
    key_of_token: StridedView
    value_of_token: StridedView


def rocm_pages(
    *, num_blocks: int, heads: int, tokens: int, head_size: int, dtype: str = "bfloat16", offset: int = 0
) -> RocmPages:
    """Views of one layer.

    Args:
      num_blocks: blocks of the pool.
      heads: key/value heads on this rank.
      tokens: tokens in a block.
      head_size: elements of a key, and of a value.
      dtype: element type.
      offset: byte of the layer's first key.

    Raises:
      LayoutError: vectors of 16 bytes that do not divide a key.
    """
    check_whole("num_blocks", num_blocks, 1, MAX_BLOCKS, LayoutError)
    for name, value in (("heads", heads), ("tokens", tokens), ("head_size", head_size)):
        check_whole(name, value, 1, MAX_TOKENS, LayoutError)
    item = item_bytes(dtype)
    x = VECTOR_BYTES // item
    if head_size % x:
        raise LayoutError("head_size", head_size, f"a multiple of {x}, the {dtype} elements of {VECTOR_BYTES} bytes")
    block = heads * tokens * head_size * item
    head = tokens * head_size * item
    key = StridedView(
        (num_blocks, heads, head_size // x, tokens, x),
        (block, head, tokens * x * item, x * item, item),
        offset,
        dtype,
    )
    value = StridedView(
        (num_blocks, heads, head_size, tokens), (block, head, tokens * item, item), offset + num_blocks * block, dtype
    )
    return RocmPages(key, value, _moved(key, (0, 1, 3, 2, 4)), _moved(value, (0, 1, 3, 2)))


def _moved(view: StridedView, axes: tuple[int, ...]) -> StridedView:
    """The same elements with their axes in another order."""
    shape, strides = (tuple(values[axis] for axis in axes) for values in (view.shape, view.strides))
    return StridedView(shape, strides, view.offset, view.dtype)

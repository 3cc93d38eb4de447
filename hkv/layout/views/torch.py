"""Strided views as PyTorch tensors over one byte buffer, without a copy. PyTorch is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from hkv.errors import LayoutError, MissingExtraError
from hkv.layout.strided import StridedView

Tensor = Any
"""A `torch.Tensor`."""


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise MissingExtraError("torch", "torch", "to see a cache as PyTorch tensors") from None


def torch_dtype(name: str) -> Any:
    """PyTorch's dtype of that name."""
    found = getattr(_torch(), name, None)
    if found is None:
        raise LayoutError("dtype", name, "a dtype that the installed PyTorch has")
    return found


def from_buffer(buffer: Any) -> Tensor:
    """A byte tensor that shares memory with `buffer`.

    Args:
      buffer: one contiguous axis of bytes: a NumPy array, a JAX array on the CPU or a GPU, or anything else with the
        DLPack or buffer protocol. A JAX array is immutable: write through the tensor only if nothing else reads it.

    Raises:
      MissingExtraError: PyTorch is not installed.
    """
    torch = _torch()
    if hasattr(buffer, "__dlpack__"):
        return torch.from_dlpack(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def view(buffer: Tensor, strided: StridedView) -> Tensor:
    """The elements of `strided` as a tensor that shares the buffer's memory.

    Args:
      buffer: the cache's bytes: a contiguous one-axis tensor of uint8 or int8.
      strided: places and type of the elements.

    Returns:
      A tensor of `strided.shape`.

    Raises:
      LayoutError: the buffer is no such thing or too short, or its own start is not aligned to the element.
      MissingExtraError: PyTorch is not installed.
    """
    torch = _torch()
    if buffer.dim() != 1 or buffer.element_size() != 1 or not buffer.is_contiguous():
        raise LayoutError("buffer", f"{buffer.dtype} of shape {tuple(buffer.shape)}", "one contiguous axis of bytes")
    strided.check_fits(buffer.numel())
    item = strided.itemsize
    if buffer.storage_offset() % item:
        raise LayoutError("buffer", buffer.storage_offset(), f"a storage offset that is a multiple of {item}")
    elements = buffer[: buffer.numel() // item * item].view(torch_dtype(strided.dtype))
    strides = tuple(stride // item for stride in strided.strides)
    start = elements.storage_offset() + strided.offset // item
    return torch.as_strided(elements, strided.shape, strides, start)

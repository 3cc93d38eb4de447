"""Strided views as NumPy arrays over one byte buffer, without a copy."""

from __future__ import annotations

import importlib

import numpy as np

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of that name, bfloat16 and the float8 kinds included.

    Raises:
      LayoutError: NumPy lacks it, and the package `ml_dtypes`, which JAX brings, is not installed.
    """
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name, name))
    except ImportError:
        if hasattr(np, name):
            return np.dtype(name)
        raise LayoutError("dtype", name, "one of NumPy's own, or the package ml_dtypes to be installed") from None


def view(buffer: np.ndarray, strided: StridedView) -> np.ndarray:
    """The elements of `strided` as an array that shares the buffer's memory.

    Args:
      buffer: the cache's bytes: one axis, uint8 or int8, without gaps.
      strided: places and type of the elements.

    Returns:
      An array of `strided.shape`; writable if the buffer is.

    Raises:
      LayoutError: the buffer is no such thing or is too short.
    """
    if buffer.ndim != 1 or buffer.dtype.itemsize != 1 or not buffer.flags.c_contiguous:
        raise LayoutError("buffer", f"{buffer.dtype} of shape {buffer.shape}", "one contiguous axis of bytes")
    strided.check_fits(buffer.size)
    return np.ndarray(
        shape=strided.shape,
        dtype=numpy_dtype(strided.dtype),
        buffer=buffer.data,
        offset=strided.offset,
        strides=strided.strides,
    )

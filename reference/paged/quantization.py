"""Quantisation by definition, one (token, head) at a time, in NumPy."""

from __future__ import annotations

import numpy as np

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def quantize_per_tensor(values: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    """Twin of `hkv.paged.quantize_per_tensor`; `dtype` is a NumPy or ml_dtypes dtype."""
    return convert(values.astype(np.float32) * (np.float32(1) / np.float32(scale)), dtype)


def quantize_per_token_head(values: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Twin of `hkv.paged.quantize_per_token_head`."""
    quantised = np.zeros(values.shape, dtype)
    scales = np.ones(values.shape[:2], np.float32)
    for token in range(values.shape[0]):
        for head in range(values.shape[1]):
            row = values[token, head].astype(np.float32)
            scale = np.max(np.abs(row)) / np.float32(LARGEST[np.dtype(dtype).name])
            scales[token, head] = max(scale, np.float32(1e-6))
            scaled = row * (np.float32(1) / scales[token, head])
            if np.dtype(dtype).name == "int8":  # halves away from zero
                scaled = np.trunc(np.where(scaled >= 0, scaled + np.float32(0.5), scaled - np.float32(0.5)))
            quantised[token, head] = convert(scaled, dtype)
    return quantised, scales


def convert(scaled: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float32 as numbers of `dtype`, rounded to nearest even and saturated."""
    largest = np.float32(LARGEST[np.dtype(dtype).name])
    clipped = np.clip(scaled, -largest, largest)
    return (np.round(clipped) if np.dtype(dtype).name == "int8" else clipped).astype(dtype)

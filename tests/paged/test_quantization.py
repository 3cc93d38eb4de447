"""Quantisation on the way into pages against its definition, to the bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference.paged.quantization as reference
from hkv import paged
from hkv.errors import LayoutError

DTYPES = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
SCALES = [0.25, 1.0, 3.0, 1e-3]


def drawn(seed, spread):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(4, 3, 8)) * 10.0 ** generator.uniform(-spread, spread, (4, 3, 1))
    values[generator.random((4, 3)) < 0.2] = 0
    return values.astype(ml_dtypes.bfloat16)


@given(st.sampled_from(DTYPES), st.sampled_from(SCALES), st.integers(0, 2**32 - 1))
def test_per_tensor(dtype, scale, seed):
    values = drawn(seed, 3)
    got = np.asarray(paged.quantize_per_tensor(values, np.float32(scale), dtype.name))
    assert got.dtype == dtype
    assert got.tobytes() == reference.quantize_per_tensor(values, scale, dtype).tobytes()


@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_per_token_and_head(dtype, seed):
    values = drawn(seed, 3)
    got, scales = paged.quantize_per_token_head(values, dtype.name)
    expected, wanted = reference.quantize_per_token_head(values, dtype)
    assert np.asarray(scales).tobytes() == wanted.tobytes()
    assert np.asarray(got).tobytes() == expected.tobytes()


@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_what_comes_back_is_close(dtype, seed):
    values = drawn(seed, 3).astype(np.float32)
    got, scales = paged.quantize_per_token_head(values, dtype.name)
    back = np.asarray(got).astype(np.float32) * np.asarray(scales)[..., None]
    step = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[dtype.name]
    assert np.all(np.abs(back - values) <= step * np.max(np.abs(values), axis=-1, keepdims=True) * 1.001)


def test_a_dtype_that_is_not_quantised_to_is_named():
    with pytest.raises(LayoutError, match="dtype = 'int4'"):
        paged.quantize_per_tensor(np.ones(3, np.float32), np.float32(1), "int4")

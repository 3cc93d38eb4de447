"""Element types by name, with their size in bytes, so that describing a cache needs neither NumPy nor JAX."""

from __future__ import annotations

from types import MappingProxyType

from hkv.errors import SpecError

ITEM_BYTES = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e8m0fnu": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "uint32": 4,
        "float32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
    }
)
"""Bytes per element of every dtype a cache may hold; names are NumPy's and ml_dtypes'."""


def item_bytes(dtype: str) -> int:
    """Bytes per element of `dtype`.

    Raises:
      SpecError: the name is not one of `ITEM_BYTES`.
    """
    try:
        return ITEM_BYTES[dtype]
    except (KeyError, TypeError):
        raise SpecError("dtype", dtype, f"one of {', '.join(ITEM_BYTES)}") from None

"""What one layer caches, one kind a file: bytes, merge rule, the positions a query can still read, its names.

Free of JAX and NumPy. A module in this package that defines a `LayerSpec` with a `kind` is found by itself: adding a
kind of layer needs no line here.
"""

import importlib
import pkgutil

from hkv.spec.attention import AttentionSpec
from hkv.spec.chunked_local import ChunkedLocal
from hkv.spec.full_attention import FullAttention
from hkv.spec.layer import KINDS, LayerSpec, spec_from_log, spec_from_text
from hkv.spec.mamba import Mamba
from hkv.spec.mla import MLAAttention
from hkv.spec.opaque import OpaqueState
from hkv.spec.sliding_window import SlidingWindow

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "KINDS",
    "AttentionSpec",
    "ChunkedLocal",
    "FullAttention",
    "LayerSpec",
    "MLAAttention",
    "Mamba",
    "OpaqueState",
    "SlidingWindow",
    "spec_from_log",
    "spec_from_text",
]

"""Cache descriptions of one layer, kinds that are alike in one file: bytes, positions that a query reads, names.

Free of JAX and NumPy. A module in this package that defines a `LayerSpec` with a `kind` is found by itself: adding a
kind of layer needs no line here.
"""

import importlib
import pkgutil

from hkv.spec.attention import AttentionSpec, KernelPages, attention_of, bounded_bytes, caches_latents, is_latent
from hkv.spec.chunked_local import ChunkedLocal
from hkv.spec.full_attention import CrossAttention, FullAttention, HiddenState, MLAAttention
from hkv.spec.layer import CLASSES, KINDS, LayerSpec, MergeError, RequestLimits, Written, retained_sparsely
from hkv.spec.mamba import Mamba
from hkv.spec.opaque import OpaqueState
from hkv.spec.sliding_window import SlidingWindow, SlidingWindowMLA
from hkv.spec.written import log_variants, spec_from_log, spec_from_text, spec_to_log, spec_to_text, text_forms

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "CLASSES",
    "KINDS",
    "AttentionSpec",
    "ChunkedLocal",
    "CrossAttention",
    "FullAttention",
    "HiddenState",
    "KernelPages",
    "LayerSpec",
    "MLAAttention",
    "Mamba",
    "MergeError",
    "OpaqueState",
    "RequestLimits",
    "SlidingWindow",
    "SlidingWindowMLA",
    "Written",
    "attention_of",
    "bounded_bytes",
    "caches_latents",
    "is_latent",
    "log_variants",
    "retained_sparsely",
    "spec_from_log",
    "spec_from_text",
    "spec_to_log",
    "spec_to_text",
    "text_forms",
]

"""Element types of RTP-LLM's caches, and the packings of other engines that it does not have."""

from __future__ import annotations

from hkv.errors import ConfigError, PlanError
from hkv.layout.content import packing
from hkv.spec import AttentionSpec

KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
"""Values of `--kv-dtype` that RTP-LLM has: what the model computes with, or float8 with its own scales."""

ELEMENTS = ("int8", "uint8", "float8_e4m3fn", "float8_e8m0fnu", "float16", "bfloat16", "float32")
"""Element types of `KVCacheSpec::dtype`."""

LATENT_FLOAT8 = "fp8_ds_mla"
"""vLLM's name for what RTP-LLM does with every float8 latent: scales and rotary key among the elements."""


def element_of(spec: AttentionSpec) -> str:
    """The element type that RTP-LLM caches a layer with; scales follow from it, see `sizes`.

    Args:
      spec: the layer, with another engine's packing or none.

    Raises:
      PlanError: a packing or an element type that RTP-LLM does not have.
    """
    name = packing(spec)
    if spec.latent and name == LATENT_FLOAT8:
        return "float8_e4m3fn"
    if spec.state_content_bytes is not None or spec.dtype not in ELEMENTS:
        raise PlanError("kv_dtype", name, f"one of RTP-LLM's: {', '.join(KV_DTYPES)}")
    return spec.dtype


def check_kv_dtype(kv_dtype: str, computed: str) -> None:
    """Makes sure that RTP-LLM can be asked for a type of cache.

    Args:
      kv_dtype: value of `--kv-dtype`.
      computed: element type that the model computes with.

    Raises:
      ConfigError: it has no such type, or caches no such elements of this model.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError("kv_dtype", kv_dtype, f"one of RTP-LLM's: {', '.join(KV_DTYPES)}")
    if kv_dtype in ELEMENTS and kv_dtype != computed:
        expected = f"{computed}, which the model computes with, or fp8: RTP-LLM converts to nothing else"
        raise ConfigError("kv_dtype", kv_dtype, expected)

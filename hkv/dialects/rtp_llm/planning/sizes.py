"""Bytes of one block of one layer on one rank under RTP-LLM, kind by kind, with the layer as it is there."""

from __future__ import annotations

import dataclasses
import math

from hkv.errors import ConfigError, PlanError, SpecError
from hkv.layout.content import packing
from hkv.spec import AttentionSpec, FullAttention, LayerSpec, Mamba, MLAAttention, is_latent
from hkv.spec.dtypes import item_bytes

SCALED = ("int8", "float8_e4m3fn")
"""Element types whose keys and values carry a float32 scale for each token and head."""

FLOAT8 = ("float8_e4m3fn", "float8_e8m0fnu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Sizes of one layer's part of one block (RTP-LLM `KVCacheSpec`). In bytes unless they say elements.

    Attributes:
      spec: the layer as this rank caches it: its heads, its blocks.
      kind: `mha`, `mla`, `linear`, `opaque_kv` or `opaque_state`.
      dtype: element type of the pool and the view (RTP-LLM `memoryLayoutDType`): of a linear layer, the cache's.
      seq_size: tokens that the block stands for.
      k_elems: elements of the first part: keys, latent, recurrent state, or all entries of an opaque block.
      v_elems: elements of the second part: values, rotary keys, convolution state; 0 for opaque blocks.
      elems: elements of the block; under float8 a latent block has more than its two parts, for scales.
      bytes: distance from one block to the next, of which `payload` carry data.
      scale: bytes of scales, which lie in a region of their own.
      local_heads: key/value heads (value heads of linear layers) on this rank; `heads` those of all, 0 without any.
      entries: entries of an opaque block, else 0; `tokens_per_entry` share one where they are compressed.
      slices: ranks that hold an equal part of the block each; `payload` then counts the data of all of them.
    """

    spec: LayerSpec
    kind: str
    dtype: str
    seq_size: int
    k_elems: int
    v_elems: int
    elems: int
    bytes: int
    payload: int
    scale: int = 0
    local_heads: int = 1
    heads: int = 0
    entries: int = 0
    tokens_per_entry: int | None = None
    slices: int = 1


def mha(*, heads: int, head_dim: int, block_size: int, dtype: str, tensor_parallel: int = 1) -> BlockBytes:
    """Keys and values (RTP-LLM `MHAKVCacheSpec`). Ranks that do not divide the heads leave `heads / gcd` on each."""
    _positive(heads=heads, head_dim=head_dim, block_size=block_size)
    ranks = max(1, tensor_parallel)
    local = heads // ranks if heads % ranks == 0 else heads // math.gcd(heads, ranks)
    side = local * head_dim * block_size
    scale = 2 * 4 * local * block_size if dtype in SCALED else 0
    size = 2 * side * item_bytes(dtype)
    spec = FullAttention(block_size=block_size, num_kv_heads=local, head_size=head_dim, dtype=dtype)
    return _unpadded(spec, "mha", dtype, (side, side), size, scale=scale, local_heads=local, heads=heads)


def mla(*, lora: int, rope: int, block_size: int, dtype: str) -> BlockBytes:
    """Latent and rotary key (RTP-LLM `MLAKVCacheSpec`); the same on every rank, scales among the elements of float8."""
    _positive(lora=lora, rope=rope, block_size=block_size)
    elems = lora + lora // 128 * 4 + rope * 2 if dtype in FLOAT8 else lora + rope
    token = elems * item_bytes(dtype)
    packed = token if dtype in FLOAT8 else None
    spec = MLAAttention(
        block_size=block_size, num_kv_heads=1, head_size=lora + rope, dtype=dtype, state_content_bytes=packed
    )
    parts = (lora * block_size, rope * block_size)
    return _unpadded(spec, "mla", dtype, parts, token * block_size, elems=elems * block_size)


def linear(
    *,
    key_heads: int,
    value_heads: int,
    head_dim: int,
    conv_kernel: int,
    block_size: int,
    tensor_parallel: int = 1,
    state_dtype: str = "bfloat16",
    conv_dtype: str = "bfloat16",
    dtype: str = "bfloat16",
) -> BlockBytes:
    """One state and one convolution state, whatever the block's tokens (RTP-LLM `LinearKVCacheSpec`).

    The convolution's kernel counts the newest token; `dtype` is that of the pool.
    """
    _positive(key_heads=key_heads, value_heads=value_heads, head_dim=head_dim, block_size=block_size)
    if conv_kernel <= 1:
        raise SpecError("conv_kernel", conv_kernel, "2 or more")
    for name, heads in (("key_heads", key_heads), ("value_heads", value_heads)):
        if heads % tensor_parallel:
            raise SpecError(name, heads, f"a multiple of {tensor_parallel} tensor-parallel ranks")
    if value_heads % key_heads:
        raise SpecError("value_heads", value_heads, f"a multiple of {key_heads} key heads")
    keys, values = key_heads // tensor_parallel, value_heads // tensor_parallel
    state = values * head_dim * head_dim
    row = 2 * head_dim * keys + head_dim * values
    conv = (conv_kernel - 1) * row
    size = state * item_bytes(state_dtype) + conv * item_bytes(conv_dtype)
    shapes = ((values, head_dim, head_dim), (conv_kernel - 1, row))
    spec = Mamba(block_size=block_size, shapes=shapes, dtypes=(state_dtype, conv_dtype))
    return _unpadded(spec, "linear", dtype, (state, conv), size, local_heads=values, heads=value_heads)


def _unpadded(spec: LayerSpec, kind: str, dtype: str, parts: tuple[int, int], size: int, **more: int) -> BlockBytes:
    """A block of two parts, all of whose bytes carry data."""
    counts = {"k_elems": parts[0], "v_elems": parts[1], "elems": sum(parts), "bytes": size, "payload": size, **more}
    return BlockBytes(spec=spec, kind=kind, dtype=dtype, seq_size=spec.block_size, **counts)


def indexer_scale_bytes(dim: int, block_size: int) -> int:
    """Bytes of the sparse indexer's keys, which take the place of the scales of a block (RTP-LLM, `is_sparse`)."""
    return (dim + dim // 128 * 4) * block_size


def _positive(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise SpecError(name, value, "a positive integer")


# Element types of RTP-LLM's caches, and the packings of other engines that it does not have.

KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
"""Values of `--kv-dtype` that RTP-LLM has: what the model computes with, or float8 with its own scales."""

ELEMENTS = ("int8", "uint8", "float8_e4m3fn", "float8_e8m0fnu", "float16", "bfloat16", "float32")
"""Element types of `KVCacheSpec::dtype`."""

LATENT_FLOAT8 = "fp8_ds_mla"
"""vLLM's name for what RTP-LLM does with every float8 latent: scales and rotary key among the elements."""


def element_of(spec: AttentionSpec) -> str:
    """The element type that RTP-LLM caches a layer with; scales follow from it, see `sizes`."""
    name = packing(spec)
    if is_latent(spec) and name == LATENT_FLOAT8:
        return "float8_e4m3fn"
    if spec.state_content_bytes is not None or spec.dtype not in ELEMENTS:
        raise PlanError("kv_dtype", name, f"one of RTP-LLM's: {', '.join(KV_DTYPES)}")
    return spec.dtype


def check_kv_dtype(kv_dtype: str, computed: str) -> None:
    """Makes sure that RTP-LLM can be asked for a type of cache."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError("kv_dtype", kv_dtype, f"one of RTP-LLM's: {', '.join(KV_DTYPES)}")
    if kv_dtype in ELEMENTS and kv_dtype != computed:
        expected = f"{computed}, which the model computes with, or fp8: RTP-LLM converts to nothing else"
        raise ConfigError("kv_dtype", kv_dtype, expected)

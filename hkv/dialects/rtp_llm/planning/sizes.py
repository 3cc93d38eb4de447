"""Bytes of one block of one layer on one rank under RTP-LLM, kind by kind, with the layer as it is there."""

from __future__ import annotations

import dataclasses
import math

from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.errors import ConfigError, PlanError, SpecError
from hkv.layout.content import packing
from hkv.limits import MAX_BYTES, MAX_TOKENS, check_whole
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
      scale: bytes of scales or of a sparse indexer's keys, which lie in a region of their own.
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


# Opaque regions: compressed keys and values, and rings of state, of which only entries are counted.


COUNTS = ("explicit", "compressed", "ring")
SLICES = ("none", "payload", "stride")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueRegion(LayerSpec):
    """Description of one layer's cache in an opaque group (the part of RTP-LLM's `KVCacheSpecDesc` that sizes it).

    Attributes:
      state: a ring of state (`OpaqueState`), else compressed keys and values (`OpaqueKV`).
      entry_elems: elements of one entry.
      entry_dtype: their type.
      count: `explicit`, `compressed` (kernel tokens over the ratio) or `ring` (ratio, overlap and drafts).
      explicit_entries: entries, for `explicit`.
      ratio: tokens that make one entry.
      overlap: windows that overlap, for `ring`.
      with_drafts: count the draft tokens of a cycle, for `ring`.
      stride: bytes from one block to the next, 0 to derive.
      alignment: bytes to which that distance is rounded up, 0 for none.
      alignment_min_entries: blocks of fewer entries are not aligned.
      cp_align_payload: under context parallelism, entries are a multiple of the ranks.
      cp_scale_seq: a block stands for the tokens of all ranks.
      cp_slice: part that a prefill rank stores: `none`, `payload` (of the entries) or `stride` (of the bytes).
      page_bytes: bytes of a block once a server's settings have sized it, 0 before.
    """

    state: bool
    entry_elems: int
    entry_dtype: str
    count: str
    explicit_entries: int = 0
    ratio: int = 1
    overlap: int = 0
    with_drafts: bool = True
    stride: int = 0
    alignment: int = 0
    alignment_min_entries: int = 0
    cp_align_payload: bool = False
    cp_scale_seq: bool = False
    cp_slice: str = "none"
    page_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        item_bytes(self.entry_dtype)
        for name, allowed in (("count", COUNTS), ("cp_slice", SLICES)):
            if getattr(self, name) not in allowed:
                raise SpecError(name, getattr(self, name), f"one of {', '.join(allowed)}")
        check_whole("entry_elems", self.entry_elems, 1, MAX_BYTES, SpecError)
        check_whole("ratio", self.ratio, 1, MAX_TOKENS, SpecError)
        for name in ("explicit_entries", "overlap", "stride", "alignment", "alignment_min_entries", "page_bytes"):
            check_whole(name, getattr(self, name), 0, MAX_BYTES, SpecError)
        if self.count == "explicit" and self.explicit_entries == 0:
            raise SpecError("explicit_entries", 0, "a positive number of entries")

    def readable(self, n: int) -> range:
        """A ring's last block of tokens; of compressed keys and values, every token."""
        return range(max(0, n - self.block_size) if self.state else 0, n)

    @property
    def page_size_bytes(self) -> int:
        """`page_bytes`."""
        return self.page_bytes


def region_of(spec: LayerSpec) -> OpaqueRegion | None:
    """The layer where it is such a region; None for any other."""
    return spec if isinstance(spec, OpaqueRegion) else None


def opaque(desc: OpaqueRegion, options: RtpOptions) -> BlockBytes:
    """One opaque block (RTP-LLM `OpaqueKVCacheSpec`, `OpaqueStateCacheSpec`), by the settings of its server.

    A compressed block is sized for one kernel block, though `seq_size` is the whole block's.
    """
    sliced = desc.cp_scale_seq or desc.cp_align_payload or desc.cp_slice != "none"
    ranks = options.slicing_ranks if sliced else 1
    prefill = ranks > 1 and options.role == "prefill"
    entries = _entries(desc, options)
    if ranks > 1 and (desc.cp_align_payload or desc.cp_slice == "payload"):
        entries = -(-entries // ranks) * ranks
        if desc.cp_slice == "payload" and prefill:
            entries //= ranks
    payload = entries * desc.entry_elems * item_bytes(desc.entry_dtype)
    slices = ranks if prefill and desc.state and desc.cp_slice == "stride" else 1
    seq_size = desc.block_size * (ranks if desc.cp_scale_seq else 1)
    stride = _stride(desc, entries, payload, slices)
    return BlockBytes(
        spec=dataclasses.replace(desc, block_size=seq_size, page_bytes=stride),
        kind="opaque_state" if desc.state else "opaque_kv",
        dtype=desc.entry_dtype,
        seq_size=seq_size,
        k_elems=entries * desc.entry_elems,
        v_elems=0,
        elems=entries * desc.entry_elems,
        bytes=stride,
        payload=payload,
        entries=entries,
        tokens_per_entry=desc.ratio if desc.count == "compressed" else None,
        slices=slices,
    )


def _entries(desc: OpaqueRegion, options: RtpOptions) -> int:
    if desc.count == "explicit":
        return desc.explicit_entries
    if desc.count == "ring":
        raw = (1 + desc.overlap) * desc.ratio + (options.drafts if desc.with_drafts else 0)
        return raw + raw % 2
    kernel = options.kernel_block_size or desc.block_size
    if kernel % desc.ratio:
        raise SpecError("ratio", desc.ratio, f"a divisor of the kernel block's {kernel} tokens")
    return kernel // desc.ratio


def _stride(desc: OpaqueRegion, entries: int, payload: int, slices: int) -> int:
    if slices > 1:
        step = math.lcm(desc.alignment, slices) if desc.alignment else slices
        return -(-payload // step) * step // slices
    if desc.stride:
        if desc.stride < payload:
            raise SpecError("stride", desc.stride, f"at least the {payload} bytes of the entries")
        return desc.stride
    if desc.alignment and entries >= desc.alignment_min_entries:
        return -(-payload // desc.alignment) * desc.alignment
    return payload

"""Opaque regions under RTP-LLM: compressed keys and values, and rings of state, of which only entries are counted."""

from __future__ import annotations

import dataclasses
import math

from hkv.dialects.rtp_llm.planning.sizes import BlockBytes
from hkv.errors import SpecError
from hkv.limits import MAX_BYTES, MAX_TOKENS, check_whole
from hkv.spec import LayerSpec
from hkv.spec.dtypes import item_bytes

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueContext:
    """Settings of a server that a region's size depends on.

    `ranks` slice a sharded cache: prefill's tensor-parallel ranks, or those a decoder was prefilled by; else 1.
    """

    kernel_tokens: int
    drafts: int = 0
    ranks: int = 1
    prefill: bool = False


def opaque(desc: OpaqueRegion, context: OpaqueContext) -> BlockBytes:
    """One opaque block (RTP-LLM `OpaqueKVCacheSpec`, `OpaqueStateCacheSpec`).

    A compressed block is sized for one kernel block, though `seq_size` is the whole block's.
    """
    sliced = desc.cp_scale_seq or desc.cp_align_payload or desc.cp_slice != "none"
    ranks = context.ranks if sliced else 1
    prefill = ranks > 1 and context.prefill
    entries = _entries(desc, context)
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


def _entries(desc: OpaqueRegion, context: OpaqueContext) -> int:
    if desc.count == "explicit":
        return desc.explicit_entries
    if desc.count == "ring":
        raw = (1 + desc.overlap) * desc.ratio + (context.drafts if desc.with_drafts else 0)
        return raw + raw % 2
    if context.kernel_tokens % desc.ratio:
        raise SpecError("ratio", desc.ratio, f"a divisor of the kernel block's {context.kernel_tokens} tokens")
    return context.kernel_tokens // desc.ratio


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

"""Opaque regions under RTP-LLM: compressed keys and values, and rings of state, of which only entries are counted."""

from __future__ import annotations

import dataclasses
import math

from hkv.dialects.rtp_llm.planning.sizes import BlockBytes
from hkv.errors import SpecError
from hkv.spec.dtypes import item_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueDesc:
    """Description from which the size of an opaque block follows (RTP-LLM `KVCacheSpecDesc`).

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueContext:
    """Settings of a server that a description's sizes depend on.

    Attributes:
      seq_size: tokens per block.
      kernel_tokens: tokens per kernel block.
      drafts: draft tokens of a cycle.
      ranks: ranks that slice a sharded cache: prefill's tensor-parallel ranks, or those a decoder was prefilled by; 1
        when the cache is not sharded.
      prefill: this is a prefill server.
    """

    seq_size: int
    kernel_tokens: int
    drafts: int = 0
    ranks: int = 1
    prefill: bool = False


def opaque(desc: OpaqueDesc, context: OpaqueContext) -> BlockBytes:
    """One opaque block (RTP-LLM `OpaqueKVCacheSpec`, `OpaqueStateCacheSpec`).

    A compressed block is sized for one kernel block, though `seq_size` is the whole block's.

    Raises:
      SpecError: the ratio does not divide the kernel block, or the stride cannot hold the entries.
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
    return BlockBytes(
        kind="opaque_state" if desc.state else "opaque_kv",
        seq_size=context.seq_size * (ranks if desc.cp_scale_seq else 1),
        k_elems=entries * desc.entry_elems,
        v_elems=0,
        elems=entries * desc.entry_elems,
        bytes=_stride(desc, entries, payload, slices),
        payload=payload,
        entries=entries,
        slices=slices,
    )


def _entries(desc: OpaqueDesc, context: OpaqueContext) -> int:
    if desc.count == "explicit":
        return desc.explicit_entries
    if desc.count == "ring":
        raw = (1 + desc.overlap) * desc.ratio + (context.drafts if desc.with_drafts else 0)
        return raw + raw % 2
    if desc.count != "compressed":
        raise SpecError("count", desc.count, "explicit, compressed or ring")
    if context.kernel_tokens % desc.ratio:
        raise SpecError("ratio", desc.ratio, f"a divisor of the kernel block's {context.kernel_tokens} tokens")
    return context.kernel_tokens // desc.ratio


def _stride(desc: OpaqueDesc, entries: int, payload: int, slices: int) -> int:
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

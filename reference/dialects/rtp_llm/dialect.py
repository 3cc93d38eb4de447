"""The records of RTP-LLM's rules in the reference's form: one for each allocator."""

from __future__ import annotations

from hkv.dialects.dialect import Rules, RuleSet
from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE
from reference.dialects.rtp_llm.allocator import KINDS, Allocator
from reference.dialects.rtp_llm.eviction import evict_and_free
from reference.dialects.rtp_llm.hybrid import HybridAllocator
from reference.dialects.rtp_llm.hybrid_pool import HybridPoolAllocator
from reference.dialects.rtp_llm.joint_reuse import joint_reuse
from reference.dialects.rtp_llm.kinds.kind import Kind
from reference.dialects.rtp_llm.single import SingleAllocator


def _dialect(name: str, allocator: type[Allocator]) -> RuleSet[type[Kind]]:
    return RuleSet(
        name=name,
        kinds={group_type.name: kind for group_type, kind in KINDS.items()},
        rules=Rules(
            hit=joint_reuse,
            admit=allocator.capacity,
            allocate=allocator.malloc,
            register=allocator.insert,
            retire=Kind.cleanup,
            free=allocator.free,
            evict=evict_and_free,
        ),
    )


RTP_SINGLE = _dialect(SINGLE, SingleAllocator)
RTP_HYBRID = _dialect(HYBRID, HybridAllocator)
RTP_HYBRID_POOL = _dialect(HYBRID_POOL, HybridPoolAllocator)
"""Kinds are called by their type of group, for that, not what a layer caches, is what these rules ask."""

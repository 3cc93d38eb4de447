"""The record of vLLM 0.33's rules in the reference's form."""

from __future__ import annotations

from hkv.dialects.dialect import Dialect, Rules
from hkv.dialects.vllm.config import NAME
from reference.dialects.vllm import coordinator
from reference.dialects.vllm.kinds.chunked_local import ChunkedLocalKind
from reference.dialects.vllm.kinds.full_attention import FullAttentionKind
from reference.dialects.vllm.kinds.kind import Kind
from reference.dialects.vllm.kinds.mamba import MambaKind
from reference.dialects.vllm.kinds.mla import MLAKind
from reference.dialects.vllm.kinds.opaque import OpaqueKind
from reference.dialects.vllm.kinds.sliding_window import SlidingWindowKind

VLLM: Dialect[type[Kind]] = Dialect(
    name=NAME,
    kinds={
        "full_attention": FullAttentionKind,
        "sliding_window": SlidingWindowKind,
        "chunked_local": ChunkedLocalKind,
        "mla": MLAKind,
        "mamba": MambaKind,
        "opaque": OpaqueKind,
    },
    rules=Rules(
        hit=coordinator.longest_hit,
        admit=coordinator.admit,
        allocate=coordinator.allocate,
        register=coordinator.register,
        retire=coordinator.retire,
        free=coordinator.free,
        evict=coordinator.evict,
    ),
)
"""What `reference.dialects.vllm.manager.Manager` follows unless it is given another record."""

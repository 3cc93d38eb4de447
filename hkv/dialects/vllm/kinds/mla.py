"""Multi-head latent attention under vLLM 0.33: managed as full attention (`FullAttentionManager`)."""

from __future__ import annotations

from hkv.dialects.vllm.kinds.full_attention import last_query, parameters, search, skipped_tokens

NUMBER = 0
LOOKED_UP_ONCE = True

__all__ = ["LOOKED_UP_ONCE", "NUMBER", "last_query", "parameters", "search", "skipped_tokens"]

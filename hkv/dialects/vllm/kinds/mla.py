"""Multi-head latent attention under vLLM 0.33: managed as full attention (`FullAttentionManager`)."""

from hkv.dialects.vllm.kinds.full_attention import parameters

__all__ = ["parameters"]

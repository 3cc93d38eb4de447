"""Multi-head latent attention: managed as full attention is."""

from reference.dialects.vllm.kinds.full_attention import FullAttentionKind


class MLAKind(FullAttentionKind):
    """vLLM 0.33 manages `MLAAttentionSpec` with its `FullAttentionManager`."""

"""Latent windows under bounded replay (vLLM 0.33 `SlidingWindowManager`): retired as windows are, and never hit."""

from hkv.dialects.vllm.kinds.sliding_window import parameters

__all__ = ["parameters"]

"""Weights that vLLM 0.33 holds on each GPU, to the byte, from a config: the parameters of its own classes, by shape."""

from hkv.dialects.vllm.weights.weights import rotary_tables, weights_of

__all__ = ["rotary_tables", "weights_of"]

"""TODO hkv/dialects/vllm/schedule."""

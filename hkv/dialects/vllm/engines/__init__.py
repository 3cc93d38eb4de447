"""TODO hkv/dialects/vllm/engines."""

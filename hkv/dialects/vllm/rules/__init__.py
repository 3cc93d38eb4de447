"""TODO hkv/dialects/vllm/rules."""

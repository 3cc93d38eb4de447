"""TODO hkv/dialects/vllm/explain."""

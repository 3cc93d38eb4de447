"""TODO hkv/dialects/vllm/log."""

"""TODO hkv/dialects/vllm/traffic."""

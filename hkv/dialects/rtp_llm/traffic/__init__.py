"""TODO hkv/dialects/rtp_llm/traffic."""

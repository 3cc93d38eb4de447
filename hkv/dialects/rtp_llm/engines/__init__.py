"""TODO hkv/dialects/rtp_llm/engines."""

"""TODO hkv/dialects/rtp_llm/log."""

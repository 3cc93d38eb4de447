"""TODO hkv/dialects/rtp_llm/explain."""

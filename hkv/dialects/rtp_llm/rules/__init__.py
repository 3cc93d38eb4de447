"""TODO hkv/dialects/rtp_llm/rules."""

"""TODO hkv/dialects/rtp_llm/schedule."""

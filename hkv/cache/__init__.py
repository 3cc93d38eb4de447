"""TODO hkv/cache."""

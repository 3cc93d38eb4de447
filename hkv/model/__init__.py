"""TODO hkv/model."""

"""TODO hkv/machine."""

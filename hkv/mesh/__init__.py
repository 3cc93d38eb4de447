"""TODO hkv/mesh."""

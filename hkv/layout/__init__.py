"""TODO hkv/layout."""

"""Conformance vectors that follow from vLLM 0.33's rules: keys, hits, plans."""

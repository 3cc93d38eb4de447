"""Engines under SGLang's rules: the reference, and an installed SGLang with its Python or its Rust tree."""

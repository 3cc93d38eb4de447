"""Engines under vLLM 0.33's rules: NumPy, JAX, the installed vLLM, and programs in processes of their own."""

"""Engines under RTP-LLM's rules: NumPy, JAX, and programs in processes of their own."""

"""Replay of request traces under vLLM 0.33's rules, in plain Python and compiled."""

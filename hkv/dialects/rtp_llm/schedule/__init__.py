"""Replay of request traces under RTP-LLM's rules, in plain Python and compiled."""

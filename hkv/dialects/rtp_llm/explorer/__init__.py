"""Exploration of a small cache under RTP-LLM's rules: its space, its states, the search through them. Host-only."""

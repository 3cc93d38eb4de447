"""Logs of caches under RTP-LLM's rules: their header, operations and answers, and how they are read."""

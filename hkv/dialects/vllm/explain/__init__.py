"""Accounts of requests and blocks in vLLM 0.33's logs, and why a hit is not longer."""

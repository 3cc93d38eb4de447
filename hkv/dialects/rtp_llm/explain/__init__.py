"""Accounts of requests and blocks in RTP-LLM's logs, and why a hit is not longer."""

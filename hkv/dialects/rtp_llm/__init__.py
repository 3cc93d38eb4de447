"""The rules of RTP-LLM's KV-cache framework (main branch, August 2026). All modules here are host-only."""

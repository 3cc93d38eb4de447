"""vLLM 0.33's second tier, compiled: chunks and their users, lookups and loads, chunks that a step offers."""

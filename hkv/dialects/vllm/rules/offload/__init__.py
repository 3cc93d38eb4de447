"""vLLM 0.33's second tier, compiled: chunks and who uses them, lookups and loads, what a step offers."""

"""vLLM 0.33.0's native KV offloading: the chunk pool, its policies, and the scheduler's side of the connector."""

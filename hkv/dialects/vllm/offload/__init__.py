"""vLLM 0.33.0's native KV offloading as a dialect: `vllm-0.33/chunks`, its chunk pool, and `vllm-0.33/offload`, the
scheduler with it."""

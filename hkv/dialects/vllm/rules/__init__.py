"""vLLM 0.33's rules as compiled transitions: hit, admission, allocation, registration, retirement, eviction."""

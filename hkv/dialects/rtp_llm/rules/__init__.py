"""RTP-LLM's rules as compiled transitions: hit, admission, allocation, insertion, eviction."""

"""RTP-LLM's rules: `manager` has the verbs, the allocators the groups together, `kinds` each type of group alone."""

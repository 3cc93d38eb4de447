"""vLLM 0.33's rules: `manager` has the verbs, `coordinator` the groups together, `kinds` each kind of layer alone."""

"""vLLM 0.33's operation logs: structs, configuration, files, comparison, coverage."""

"""RTP-LLM's operation logs: structs, configuration, files, coverage."""

"""Random configurations and traffic under RTP-LLM's rules."""

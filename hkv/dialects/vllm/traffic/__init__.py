"""Random configurations and traffic under vLLM 0.33's rules."""

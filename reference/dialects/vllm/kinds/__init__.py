"""What vLLM's rules say of each kind of layer, one kind a file."""

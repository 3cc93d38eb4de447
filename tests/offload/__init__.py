"""Tests of vLLM's second tier as a dialect."""

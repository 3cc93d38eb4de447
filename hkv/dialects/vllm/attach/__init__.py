"""Observation of vLLM's own `KVCacheManager`: its header, its requests, the hooks, and the plugin that sets them."""

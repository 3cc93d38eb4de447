"""SGLang 0.5.23's prefix cache in plain Python: a radix tree over pages, its pools, its locks and its eviction."""

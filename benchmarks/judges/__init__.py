"""Judges of HKV's reading of a model: vLLM's own model classes, and the caches that `transformers` makes.

`python benchmarks/model_classes.py` asks them and records their answers.
"""

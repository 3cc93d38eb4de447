"""Serves Hugging Face checkpoints with HKV: `engine` the loop, `families` the models, `record` what to expect."""

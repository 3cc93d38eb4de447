"""The engine room of `--engine jax`, replay and explore: operations one by one, compiled to native loops."""

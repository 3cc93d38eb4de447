"""The gate on compiled code: what every operation of the data plane compiles to for GPUs that are not there.

`python -m tests.compiled_code` compiles all of it with JAX's CUDA plugin, writes what it found to
`tests/data/compiled_code.json`, and the tables of `docs/tables/compiled-code.md`; `--check` compares instead.
"""

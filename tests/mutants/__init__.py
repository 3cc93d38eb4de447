"""Planted defects, as rows of data: published bugs, and one-line edits, each with what must notice it.

The rows lie in `tests/mutants/rows`; `python -m tests.mutants` plants every one by itself and runs its judge.
"""

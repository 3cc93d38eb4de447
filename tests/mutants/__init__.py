"""Planted defects as rows of data: one edit of one function each, and the property that must notice it.

`python -m tests.mutants` plants every row by itself and runs its judge; see `tests/mutants/__main__.py`.
"""

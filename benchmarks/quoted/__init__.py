"""Quotations in the documents: sentences with figures in them, tables and console blocks, and what makes each of them.

`python benchmarks/claims.py` remakes them.
"""

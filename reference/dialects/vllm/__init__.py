"""VLLM 0.33's rules as a text: records, pool, finding, admission, growth, registering, leaving, operations."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference.language import Clause

CHAPTERS = (
    *("records", "pool", "cases", "finding", "admission", "growth", "registering", "leaving", "forking"),
    "operations",
)
"""Modules of the text."""


def clauses() -> Mapping[str, Clause]:
    """The named clauses of the text, by name, in reading order."""
    texts = [importlib.import_module(f"{__name__}.{chapter}").TEXT for chapter in CHAPTERS]
    return {name: clause for text in texts for name, clause in text.clauses.items()}

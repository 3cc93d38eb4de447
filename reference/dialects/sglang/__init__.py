"""SGLang 0.5.23's rules, in reading order: records, pools, radix, holding, evicting, requests, operations."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference.language import Clause

CHAPTERS = ("records", "pools", "radix", "holding", "evicting", "requests", "operations")
"""Modules of the text."""


def clauses() -> Mapping[str, Clause]:
    """The named clauses of the text, by name, in reading order."""
    texts = [importlib.import_module(f"{__name__}.{chapter}").TEXT for chapter in CHAPTERS]
    return {name: clause for text in texts for name, clause in text.clauses.items()}

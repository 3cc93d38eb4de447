"""VLLM 0.33's native KV offloading, in reading order: the pool of chunks, the connector's side of the scheduler, the
scheduler itself, and the simpler tier."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference.language import Clause

CHAPTERS = (
    *("keys", "records", "doubles", "policies", "pool"),
    *(
        "lookup",
        "offers",
        "jobs",
        "stores",
        "connector",
        "lives",
        "telling",
        "serving",
        "offloading",
        "copies",
        "simple",
    ),
)
"""Modules of the text."""


def clauses() -> Mapping[str, Clause]:
    """The named clauses of the text, by name, in reading order."""
    texts = [importlib.import_module(f"{__name__}.{chapter}").TEXT for chapter in CHAPTERS]
    return {name: clause for text in texts for name, clause in text.clauses.items()}

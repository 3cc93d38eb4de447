"""RTP-LLM's rules, in reading order: records, pools, tree, cache, evicting, lists, allocating, forking, peaks and
operations. Beside this text stand bytes (`data_plane`, `pool_walk`, `shares`), `connector_projection`, and an older
cache (`legacy_cache`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference.language import Clause

CHAPTERS = (
    *("records", "pools", "tree", "cache", "evicting", "lists", "allocating", "forking", "peaks"),
    "operations",
)
"""Modules of the text."""


def clauses() -> Mapping[str, Clause]:
    """The named clauses of the text, by name, in reading order."""
    texts = [importlib.import_module(f"{__name__}.{chapter}").TEXT for chapter in CHAPTERS]
    return {name: clause for text in texts for name, clause in text.clauses.items()}

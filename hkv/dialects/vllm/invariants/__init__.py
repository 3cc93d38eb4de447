"""Invariants of a hybrid cache, as named checks on any engine that speaks the operation log.

Each check sees one operation with the cache before and after it, and keeps its own account of requests: it knows no
engine's internals. `Watch` asks them after every operation.
"""

from hkv.dialects.vllm.invariants import content, hits, pool, rows, shadow
from hkv.dialects.vllm.invariants.moment import INVARIANTS, KeyBook, Moment, Snapshot
from hkv.dialects.vllm.invariants.watch import Watch

CHAPTERS = (content, hits, pool, rows, shadow)
"""Modules whose import fills `INVARIANTS`."""

__all__ = ["CHAPTERS", "INVARIANTS", "KeyBook", "Moment", "Snapshot", "Watch"]

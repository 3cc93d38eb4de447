"""Every claim, a module for a document or a few."""

from __future__ import annotations

from benchmarks.quoted.documents import dialects, evidence, hits, others, speed, sweep

CLAIMS = (*evidence.CLAIMS, *hits.CLAIMS, *dialects.CLAIMS, *speed.CLAIMS, *others.CLAIMS, *sweep.CLAIMS)

__all__ = ["CLAIMS"]

"""The suites that judge code, alone: seeded examples, named invariants, no second implementation to compare with."""

import importlib

from tests.suites.history import HistorySuite
from tests.suites.suite import CaseCheck, CaseSuite, Failure, Suite

__all__ = ["SUITES", "CaseCheck", "CaseSuite", "Failure", "Suite"]

_MODULES = (
    *("traffic", "cached_sets", "resend", "rtp", "alone", "chunking", "keys", "misuse", "pages", "plans", "slots"),
    *("tails", "tiers", "transfers"),
)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for name in _MODULES
    for suite in vars(importlib.import_module(f"tests.suites.{name}")).values()
    if isinstance(suite, (CaseSuite, HistorySuite))
}
"""Every suite, by name."""

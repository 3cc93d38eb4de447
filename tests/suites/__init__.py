"""The suites that judge code, alone: seeded examples, named invariants, no second implementation to compare with."""

import importlib

from tests.suites.suite import CaseCheck, CaseSuite, Failure, Suite

__all__ = ["SUITES", "CaseCheck", "CaseSuite", "Failure", "Suite"]

_MODULES = (
    *("traffic", "comeback", "cached_sets", "resend", "rtp", "alone", "chunking", "checkpoints", "keys", "misuse"),
    *("pages", "plans", "siblings", "slots", "tails", "tiers", "transfers"),
)
_EVERY: list[Suite] = [importlib.import_module(f"tests.suites.{name}").SUITE for name in _MODULES]

SUITES: dict[str, Suite] = {suite.name: suite for suite in _EVERY}
"""Every suite, by name."""

"""The suites that judge code, alone: seeded examples, named invariants, no second implementation to compare with."""

from hkv.testing.suites import cached_sets
from hkv.testing.suites.suite import CaseCheck, CaseSuite, Failure, Suite
from hkv.testing.suites.traffic import TrafficSuite

__all__ = ["SUITES", "CaseCheck", "CaseSuite", "Failure", "Suite"]

SUITES: dict[str, Suite] = {suite.name: suite for suite in (TrafficSuite(), cached_sets.SUITE)}
"""Every suite, by name."""

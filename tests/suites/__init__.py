"""The suites that judge code, alone: seeded examples, named invariants, no second implementation to compare with."""

from tests.suites import (
    alone,
    cached_sets,
    checkpoints,
    chunking,
    comeback,
    keys,
    misuse,
    pages,
    plans,
    resend,
    rtp,
    siblings,
    slots,
    tails,
    tiers,
    traffic,
    transfers,
)
from tests.suites.suite import CaseCheck, CaseSuite, Failure, Suite

__all__ = ["SUITES", "CaseCheck", "CaseSuite", "Failure", "Suite"]

_EVERY: tuple[Suite, ...] = (
    traffic.SUITE,
    comeback.SUITE,
    cached_sets.SUITE,
    resend.SUITE,
    rtp.SUITE,
    alone.SUITE,
    chunking.SUITE,
    checkpoints.SUITE,
    keys.SUITE,
    misuse.SUITE,
    pages.SUITE,
    plans.SUITE,
    siblings.SUITE,
    slots.SUITE,
    tails.SUITE,
    tiers.SUITE,
    transfers.SUITE,
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in _EVERY}
"""Every suite, by name."""

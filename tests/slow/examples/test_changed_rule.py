"""A changed rule, in as few places as it is said: a window that keeps one more block behind it."""

from __future__ import annotations

import pytest

import hkv
from hkv.testing.planting import Patch, applied

PLAIN = "reference.dialects.vllm.kinds.sliding_window:SlidingWindowKind"
REFERENCE = (
    Patch(f"{PLAIN}.skipped_tokens", "self.spec.window + 1", "self.spec.window + 1 - self.spec.block_size"),
    Patch(f"{PLAIN}.admission_cap", "self.spec.window - 1", "self.spec.window - 1 + self.spec.block_size"),
)
COMPILED = Patch(
    "hkv.dialects.vllm.kinds.sliding_window:parameters",
    "kept = spec.window - 1",
    "kept = spec.window - 1 + spec.block_size",
)
"""All that says how far a window reaches back to what is kept: a file of the reference, and one of compiled rules."""


def parted() -> bool:
    """True if the two forms, driven through the same random traffic, differ anywhere."""
    found = hkv.diff("numpy", "jax", kinds=["sliding_window"], features=["core"], seeds=12, shrink=False)
    return bool(found.found)


def test_both_forms_follow():
    with applied(*REFERENCE, COMPILED):
        assert not parted()


@pytest.mark.parametrize("changed", [REFERENCE, (COMPILED,)])
def test_one_form_alone_is_told(changed):
    with applied(*changed):
        assert parted()

"""A sample of the planted defects of our own, each a program of its own to compile."""

from __future__ import annotations

from tests.mutants.catalogue import SECTIONS
from tests.mutants.test_command import apart


def test_the_sample_is_killed():
    """Compiled rules take ten seconds a row, bytes and kernels less than one."""
    every = {"compiled": 40, "state": 3, "step": 24, "paged": 1, "kernels": 1}
    sample = [row.name for section, step in every.items() for row in SECTIONS[section][::step]]
    ran = apart("-m", "tests.mutants", *(text for name in sample for text in ("--only", name)))
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert f"{len(sample)} of {len(sample)} mutants killed" in ran.stdout

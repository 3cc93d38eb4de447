"""`benchmarks/rtp_evictions.py`: every eviction takes what it says, in caches of two sizes."""

from __future__ import annotations

import pytest

from benchmarks.rtp_evictions import measure, with_ratios


@pytest.mark.parametrize("tree", [True, False])
def test_evictions_take_a_chain_or_a_key(tree: bool) -> None:
    found = with_ratios([measure(keys, tree, 1) for keys in (800, 4_000)])
    assert [each["blocks"] for each in found] == [8 if tree else 2] * 2
    assert found[0]["ratio"] == 1

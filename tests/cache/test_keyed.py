"""Requests whose keys are given, more of them than their tokens have: both forms in step."""

from __future__ import annotations

import dataclasses

import pytest

from hkv.model.topology import Topology
from hkv.spec import FullAttention, SlidingWindow
from tests.cache.build import config
from tests.cache.pair import Pair


@pytest.mark.parametrize("lookahead", [0, 1, 3, 5])
def test_given_keys_beyond_the_lookahead_are_not_used(lookahead: int) -> None:
    """A caller that knows the whole prompt's keys gives them all; those of unknown tokens find nothing."""
    pair = Pair(config(FullAttention(block_size=4), hash_lookahead=lookahead))
    pair.request("a", 40, range(100, 200))
    assert pair.allocate("a", 40)
    pair.advance("a", 40)
    hits = []
    for tokens in range(5, 30):
        pair.request("b", tokens, range(100, 200))
        hits.append(pair.lookup("b"))
        pair.drop("b")
    assert hits == [(tokens - max(lookahead, 1)) // 4 * 4 for tokens in range(5, 30)]


@pytest.mark.parametrize(("cached", "hit"), [(3, 0), (5, 8), (7, 16)])
def test_what_the_drop_leaves_of_a_short_window_is_rounded_again(cached: int, hit: int) -> None:
    """Too few blocks for the window, but all from the first one on: a hit ends where both groups' blocks do."""
    specs = FullAttention(block_size=8), SlidingWindow(block_size=4, window=65)
    settings = dataclasses.replace(config(*specs), topology=Topology.of_specs(specs, [1]), eagle=True)
    pair = Pair(settings)
    pair.request("a", 4 * cached, range(100, 100 + cached))
    assert pair.allocate("a", 4 * cached)
    pair.advance("a", 4 * cached)
    pair.request("b", 60, range(100, 115))
    assert pair.lookup("b") == hit

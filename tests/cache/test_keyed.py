"""Requests whose keys are given, more of them than their tokens have: both forms in step."""

from __future__ import annotations

import pytest

from hkv.spec import FullAttention
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

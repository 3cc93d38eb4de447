"""Static sizes are refused alike in every arrangement of a cache's arrays, before anything is made of them."""

from __future__ import annotations

import dataclasses

import pytest

from hkv.errors import ConfigError
from hkv.state import pooled
from hkv.state.pooled import PooledBuckets
from hkv.state.state import Buckets

LINKED = Buckets(blocks=8, requests=2, groups=2, row=4, chain=4, keys=8)
POOLED = PooledBuckets(blocks=8, groups=1, pools=1, requests=2, sequences=1, row=4, chain=4, keys=8)


@pytest.mark.parametrize("buckets", [LINKED, POOLED], ids=["linked", "pooled"])
def test_sizes_are_positive_integers_and_those_of_options_may_be_none(buckets):
    for name in vars(buckets):
        for value in (-1, 0, 1.0, True):
            if value == 0 and name in ("parts", "beside", "names") and type(value) is int:
                dataclasses.replace(buckets, **{name: value})
            else:
                with pytest.raises(ConfigError, match=f"{name} = {value}: expected a (positive|non-negative) integer"):
                    dataclasses.replace(buckets, **{name: value})


@pytest.mark.parametrize(("buckets", "name"), [(POOLED, "row"), (POOLED, "keys")])
def test_arrays_that_are_too_large_are_refused(buckets, name):
    with pytest.raises(ConfigError, match=f"{name} = {1 << 29}: expected fewer, so that the array"):
        dataclasses.replace(buckets, **{name: 1 << 29})


@pytest.mark.parametrize(("name", "value"), [("pools", 2), ("groups", 33), ("sequences", 5)])
def test_pools_groups_and_sequences_fit_each_other(name, value):
    with pytest.raises(ConfigError):
        dataclasses.replace(POOLED, **{name: value})


def test_a_state_grows_in_some_sizes_and_keeps_the_others():
    pools = pooled.empty_pooled(POOLED, (8,))
    with pytest.raises(ConfigError, match="chain = 3: expected at least 4"):
        pooled.resized(pools, dataclasses.replace(POOLED, chain=3))
    with pytest.raises(ConfigError, match="blocks = 9: expected 8, as before"):
        pooled.resized(pools, dataclasses.replace(POOLED, blocks=9))

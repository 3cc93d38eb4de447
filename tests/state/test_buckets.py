"""Static sizes are refused before any array is made of them."""

from __future__ import annotations

import dataclasses

import pytest

from hkv.errors import ConfigError
from hkv.state.state import Buckets

BUCKETS = Buckets(blocks=8, requests=2, groups=2, row=4, chain=4, keys=8)


@pytest.mark.parametrize("name", vars(BUCKETS))
@pytest.mark.parametrize("value", [-1, 0, 1.0, True])
def test_sizes_are_positive_integers_and_those_of_options_may_be_none(name, value):
    if type(value) is int and value == 0 and name in ("parts", "beside"):
        dataclasses.replace(BUCKETS, **{name: value})
    else:
        with pytest.raises(ConfigError, match=f"{name} = {value}: expected an integer of at least [01]"):
            dataclasses.replace(BUCKETS, **{name: value})

"""Blocks that come from outside are registered and queued as those of requests that ended."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache.insertion import insert
from hkv.keys.fingerprint import ROOT
from hkv.state.status import Status
from reference.keys import fingerprint
from tests.reference.build import config as build
from tests.step.sample import assert_same, configs
from tests.step.test_arrivals import arrive, plain
from tests.step.test_step import Pair, R, T, drawn_tokens

K = 12
inserted = jax.jit(insert, donate_argnums=0)


def both(pair: Pair, entries) -> list[int] | None:
    """Both caches take the entries; the new blocks, None for a refusal."""
    groups, keys = np.full(K, -1, np.int32), np.zeros((K, 4), np.uint32)
    for lane, (group, key) in enumerate(entries):
        groups[lane], keys[lane] = group, key
    want = pair.rows.insert(entries)
    pair.state, blocks, status = inserted(pair.state, groups, keys)
    assert int(status) == (Status.NO_ROOM if want is None else Status.OK)
    assert blocks.tolist() == (want or []) + [-1] * (K - len(want or []))
    assert_same(pair.rows, pair.state)
    return want


@settings(max_examples=40)
@given(config=configs(least_blocks=12).filter(lambda config: config.caching and plain(config)), data=st.data())
def test_what_is_inserted_is_found_evicted_and_given_back_like_any_block(config, data):
    pair = Pair(config)
    longest = min(40, 48 - T, min(config.block_sizes) * 20 - T)
    base = [data.draw(st.integers(0, 1)) for _ in range(longest)]
    size, specs = config.hash_block_size, config.topology.specs
    whole = np.array(base[: longest // size * size], np.int64).reshape(-1, size)
    keys = [tuple(int(word) for word in key) for key in fingerprint.keys(whole, ROOT)]
    ends = [
        (group, keys[end // size - 1])
        for group, spec in enumerate(specs)
        if spec.prefix_cacheable
        for end in range(config.block_size(group), len(keys) * size + 1, config.block_size(group))
    ]
    for _ in range(data.draw(st.integers(2, 5))):
        both(pair, data.draw(st.lists(st.sampled_from(ends), max_size=K)) if ends else [])
        new = {}
        for row in range(R):
            if pair.rows.names[row] is None and data.draw(st.booleans()):
                new[row] = base[: data.draw(st.integers(1, longest))]
            elif pair.rows.names[row] is not None and data.draw(st.booleans()):
                pair.finish(row)
        arrive(pair, new)
        pair.step(drawn_tokens(data, pair))


@pytest.mark.parametrize("group", [-2, 7])
def test_a_group_that_does_not_exist_is_refused(group):
    pair = Pair(build("full:2", num_blocks=9))
    groups = np.array([0, group] + [-1] * (K - 2), np.int32)
    state, blocks, status = inserted(pair.state, groups, np.ones((K, 4), np.uint32))
    assert int(status) == Status.OUT_OF_RANGE
    assert blocks.tolist() == [-1] * K
    assert not np.asarray(state.refs).any()

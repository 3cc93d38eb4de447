"""The verb that compiles most: an allocation alone does what it does among all operations."""

from __future__ import annotations

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Batch, Code
from tests.cache.build import run, start


def test_an_allocation_is_an_operation() -> None:
    states = []
    for alone in (True, False):
        parameters, state = start()
        state, _ = cache.request(parameters, state, 0, np.arange(4, dtype=np.int32), tokens=17)
        if alone:
            state, results = cache.allocate(parameters, state, 0, new=17, shared_prefix=-1)
        else:
            state, results = run(parameters, state, Batch().add(Code.ALLOCATE, 0, new=17, shared_prefix=-1))
        cache.check(results)
        states.append(jax.device_get(state))
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one[:-1], other[:-1])  # the last is spare

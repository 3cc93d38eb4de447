"""Sums and maxima of what stands up to each place."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hkv.cache.spans import running_max, running_sum


@pytest.mark.parametrize("size", [1, 7, 16, 17, 64, 65, 500])
def test_places_up_to_each_are_summed_and_compared_in_lines(size):
    values = np.random.default_rng(size).integers(0, 1000, (2, size)).astype(np.int32)
    assert jax.jit(running_sum)(values).tolist() == np.cumsum(values, axis=1).tolist()
    assert jax.jit(running_max)(values[0]).tolist() == np.maximum.accumulate(values[0]).tolist()

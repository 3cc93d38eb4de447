"""Pools, run starts and the loops that say what gathering and scattering runs must do."""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np
from hypothesis import strategies as st

from tests import needs

DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
"""JAX 0.11 warns when it lowers Pallas on Triton; the backend is isolated in two files and known to be going."""

ON_GPU = pathlib.Path("/dev/nvidia0").exists() and not needs.lacks_cuda_plugin()
"""True if JAX computes on a GPU here, found out without using JAX: judges of planted defects are forked afterwards."""

HAS_TRITON = ON_GPU and importlib.util.find_spec("jax_triton") is not None
"""True if the kernel of jax-triton can run: it has no interpreter of its own."""


def runnable(kernel):
    """Name of a kernel as this machine can run it: compiled for its GPU, or interpreted where there is none."""
    return kernel if ON_GPU else f"{kernel}:interpret"


NUM_ROWS = 8
WRONG = (-1, -2, -(2**31), NUM_ROWS, NUM_ROWS + 1, 2**31 - 1)
"""Rows that no run can start at; a run of two rows cannot start at the last row either."""


def random_words(shape, dtype, seed):
    """Random bits: of a float dtype, NaNs with payloads among them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)


def bits(array):
    return np.asarray(array).tobytes()


def gather_by_loops(pools, starts, rows_per_run):
    found = np.zeros((*starts.shape, rows_per_run, pools[0].shape[1]), pools[0].dtype)
    for index in np.ndindex(starts.shape):
        if 0 <= starts[index] <= len(pools[0]) - rows_per_run:
            for row in range(rows_per_run):
                found[index][row] = pools[index[0]][starts[index] + row]
    return found


def scatter_by_loops(pools, starts, values):
    pools = [pool.copy() for pool in pools]
    for index in np.ndindex(starts.shape):
        if 0 <= starts[index] <= len(pools[0]) - values.shape[3]:
            for row in range(values.shape[3]):
                pools[index[0]][starts[index] + row] = values[index][row]
    return pools


@st.composite
def gather_starts(draw, pools, n, runs, rows_per_run):
    """Any rows, repeated ones among them, and some that are none, the one after the last among those."""
    rows = st.sampled_from([*range(NUM_ROWS - rows_per_run + 2), *WRONG])
    count = pools * n * runs
    return np.int32(draw(st.lists(rows, min_size=count, max_size=count))).reshape(pools, n, runs)


@st.composite
def scatter_starts(draw, pools, n, runs, rows_per_run):
    """Per pool, runs that do not overlap, and some that are dropped."""
    found = []
    for _ in range(pools):
        places = draw(st.permutations(range(0, NUM_ROWS - rows_per_run + 1, rows_per_run)))
        wrong = draw(
            st.lists(
                st.sampled_from([None, None, NUM_ROWS - rows_per_run + 1, *WRONG]), min_size=n * runs, max_size=n * runs
            )
        )
        places = [*places, *[-1] * (n * runs)][: n * runs]
        found += [place if other is None else other for place, other in zip(places, wrong, strict=True)]
    return np.int32(found).reshape(pools, n, runs)

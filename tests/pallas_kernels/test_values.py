"""Every implementation of gather and scatter against loops, bit for bit, the GPU kernels interpreted on the CPU.

The `triton` implementation is named when its extra is missing, interpreted here, and compiled by `compiled_code`.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import ConfigError, MissingExtraError
from hkv.paged.implementations import choose
from pallas_kernels import tma_tiles
from pallas_kernels.move import mosaic
from pallas_kernels.move import runs as as_moves
from tests.pallas_kernels import cases

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

OLD_JAX = jax.__version_info__ < (0, 11)
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Words a row and dtype; pools, units, runs a unit, rows a run. Bulk copies move the marked ones.
SHAPES = {
    "indexer row of 132 bytes": (132, np.uint8, 1, 3, 2, 1),
    "latent of 576 in words of 2 bytes (bulk)": (576, np.uint16, 1, 3, 1, 1),
    "656 bytes, runs of two rows": (656, np.uint8, 1, 2, 2, 2),
    "256 bytes, two pools (bulk)": (256, np.uint8, 2, 2, 2, 1),
    "64 words of 4 bytes, runs of two rows (bulk)": (64, np.uint32, 1, 2, 1, 2),
    "two bytes, four rows, three pools": (2, np.uint8, 3, 2, 1, 4),
    "float32 itself (bulk)": (32, np.float32, 2, 2, 1, 2),
    "5000 bytes, whose last tile hangs over": (5000, np.uint8, 1, 2, 1, 1),
    "40 KiB, several tiles of a bulk copy (bulk)": (40960, np.uint8, 1, 2, 1, 1),
}
BULK = {name: shape for name, shape in SHAPES.items() if "bulk" in name}
SMALL = {name: shape for name, shape in SHAPES.items() if name not in BULK} if not cases.ON_GPU else SHAPES
"""Shapes for implementations that move any: where these are interpreted, `test_moves.py` has the others' widths."""

GATHERS = {
    **{f"xla, {name}": ("xla", shape) for name, shape in SMALL.items()},
    **{f"pallas_triton, {name}": (cases.runnable("pallas_triton"), shape) for name, shape in SMALL.items()},
    **{f"mosaic, {name}": (cases.runnable("mosaic"), shape) for name, shape in BULK.items()},
    **{f"triton, {name}": ("triton", shape) for name, shape in SHAPES.items() if cases.HAS_TRITON},
}
JITTED = {name: jax.jit(choose(name).gather_runs, static_argnums=2) for name, _ in GATHERS.values()}
JITTED_SCATTER = {name: jax.jit(choose(name).scatter_runs) for name, _ in GATHERS.values()}


def examples_of(implementation):
    """Mosaic's interpreter takes a tenth of a second a call, the others next to nothing."""
    return 4 if implementation.startswith("mosaic") else 15


@pytest.mark.parametrize(("implementation", "shape"), GATHERS.values(), ids=GATHERS)
def test_gather(implementation, shape):
    check_gather(implementation, shape)


def check_gather(implementation, shape):
    row, dtype, pools, n, runs, rows_per_run = shape

    @given(cases.gather_starts(pools, n, runs, rows_per_run), st.integers(0, 2**32 - 1))
    @settings(max_examples=examples_of(implementation))
    def check(starts, seed):
        arrays = [cases.random_words((cases.NUM_ROWS, row), dtype, seed + index) for index in range(pools)]
        found = JITTED[implementation](tuple(arrays), starts, rows_per_run)
        assert cases.bits(found) == cases.bits(cases.gather_by_loops(arrays, starts, rows_per_run))

    check()


@pytest.mark.parametrize(("implementation", "shape"), GATHERS.values(), ids=GATHERS)
def test_scatter(implementation, shape):
    if OLD_JAX and implementation.startswith("mosaic"):
        pytest.skip("JAX 0.10 cannot interpret a Mosaic GPU kernel that writes through a reference (KeyError: None)")
    check_scatter(implementation, shape)


def check_scatter(implementation, shape):
    row, dtype, pools, n, runs, rows_per_run = shape

    @given(cases.scatter_starts(pools, n, runs, rows_per_run), st.integers(0, 2**32 - 1))
    @settings(max_examples=examples_of(implementation))
    def check(starts, seed):
        arrays = [cases.random_words((cases.NUM_ROWS, row), dtype, seed + index) for index in range(pools)]
        values = cases.random_words((pools, n, runs, rows_per_run, row), dtype, seed + 99)
        found = JITTED_SCATTER[implementation](tuple(arrays), starts, values)
        expected = cases.scatter_by_loops(arrays, starts, values)
        assert [cases.bits(pool) for pool in found] == [cases.bits(pool) for pool in expected]

    check()


@pytest.mark.parametrize("shape", [shape for name, shape in SHAPES.items() if name not in BULK])
def test_runs_that_no_bulk_copy_can_move_are_refused(shape):
    row, dtype, pools, n, runs, rows_per_run = shape
    arrays = tuple(np.zeros((cases.NUM_ROWS, row), dtype) for _ in range(pools))
    starts, values = np.zeros((pools, n, runs), np.int32), np.zeros((pools, n, runs, rows_per_run, row), dtype)
    with pytest.raises(ConfigError, match="implementation = 'mosaic"):
        choose(cases.runnable("mosaic")).gather_runs(arrays, starts, rows_per_run)
    with pytest.raises(ConfigError, match="implementation = 'mosaic"):
        choose(cases.runnable("mosaic")).scatter_runs(arrays, starts, values)
    for moved, argument in ((as_moves.gather_runs, rows_per_run), (as_moves.scatter_runs, values)):
        with pytest.raises(ValueError, match="expected lines of a multiple of 16 bytes"):
            moved(mosaic.move_runs, arrays, starts, argument)


@pytest.mark.parametrize(
    ("implementation", "row"),
    [(name, row) for name in JITTED for row in (132, 256) if row == 256 or not name.startswith("mosaic")],
)
def test_nothing_to_move(implementation, row):
    pool = cases.random_words((cases.NUM_ROWS, row), np.uint8, 0)
    starts = np.zeros((1, 0, 2), np.int32)
    found = JITTED[implementation]((pool,), starts, 2)
    assert found.shape == (1, 0, 2, 2, row)
    (kept,) = JITTED_SCATTER[implementation]((pool,), starts, np.zeros((1, 0, 2, 2, row), np.uint8))
    assert cases.bits(kept) == cases.bits(pool)


@pytest.mark.parametrize("implementation", [cases.runnable("mosaic"), "xla"])
def test_more_tiles_than_a_ring_has_stages(implementation):
    more_tiles_than_stages(implementation)


def more_tiles_than_stages(implementation):
    """Sixteen tiles go round a program's ring of four stages, and four more do in another; every one is another row."""
    pool = cases.random_words((40, 128), np.uint8, 3)
    starts = np.random.default_rng(0).permutation(40)[:20].astype(np.int32).reshape(1, 20, 1)
    # Few tiles would be spread over all multiprocessors, one a program.
    with mock.patch.object(tma_tiles, "PROGRAMS", 1):
        found = jax.jit(choose(implementation).gather_runs, static_argnums=2)((pool,), starts, 1)
        assert cases.bits(found) == cases.bits(pool[starts[0, :, 0]])
        if OLD_JAX and implementation.startswith("mosaic"):
            return
        values = cases.random_words((1, 20, 1, 1, 128), np.uint8, 4)
        starts[0, 5, 0] = starts[0, 11, 0] = -1
        (written,) = jax.jit(choose(implementation).scatter_runs)((pool,), starts, values)
        assert cases.bits(written) == cases.bits(cases.scatter_by_loops([pool], starts, values)[0])


def gather_of(implementation, name):
    """Check by which defects of a kernel are judged (`tests/mutants`): runs of a shape that has a name."""
    check_gather(implementation, SHAPES[name])


def scatter_of(implementation, name):
    """As `gather_of`."""
    check_scatter(implementation, SHAPES[name])


@pytest.mark.python312
@pytest.mark.skipif(not OLD_JAX, reason="this JAX interprets Mosaic scatter itself")
def test_mosaic_scatter_under_a_newer_python():
    """The scatters that this JAX cannot interpret, in an interpreter of JAX 0.11 or later."""
    python = os.environ.get("HKV_PYTHON312") or shutil.which("python3.12")
    probe = "import hypothesis, jax, pytest; assert jax.__version_info__ >= (0, 11)"
    if python is None or subprocess.run([python, "-c", probe], capture_output=True).returncode:
        pytest.skip("no Python 3.12 with JAX 0.11, pytest and hypothesis: set HKV_PYTHON312 to one")
    chosen = "test_scatter and mosaic and bulk or test_more_tiles and mosaic"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert f"{len(BULK) + 1} passed" in ran.stdout


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


@pytest.mark.skipif(has("jax_triton") and jax.default_backend() == "gpu", reason="jax-triton works here")
def test_a_missing_extra_is_named():
    if has("jax_triton", "jax_plugins"):
        pytest.skip("jax-triton is installed and JAX has GPU support, so nothing is missing")
    before = os.environ.get("TRITON_CACHE_DIR")
    with pytest.raises(MissingExtraError, match="implementation='triton'") as found:
        choose("triton")
    assert found.value.extra == "gpu"
    assert os.environ.get("TRITON_CACHE_DIR") == before


@pytest.mark.triton
@pytest.mark.torch
def test_values_under_tritons_interpreter():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "tests.pallas_kernels.triton_values"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "40 kernels agree" in ran.stdout

"""Implementations that move the runs: what a name needs, what `auto` takes, and what is reported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv import paged
from hkv.errors import ConfigError, HKVError
from hkv.paged import implementations
from hkv.paged.implementations import implementation_of_moves
from hkv.paged.words import Target, traced_for
from tests.pallas_kernels import cases, programs

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

BULK = jax.ShapeDtypeStruct((64, 4096), np.uint8)
"""Rows that bulk copies can move."""

SMALL = jax.ShapeDtypeStruct((64, 256), np.uint8)
"""Rows that they can move, and are not worth it."""

INDEXER = jax.ShapeDtypeStruct((64, 132), np.uint8)
"""Rows that they cannot."""

A100 = Target("gpu", "NVIDIA A100", (8, 0))
H200 = Target("gpu", "NVIDIA H200", (9, 0))
DESCRIBED = Target("gpu", "NVIDIA H200", None)
CPU = Target("cpu", "cpu", (0, 0))


def implementation_of_rows(name, pool):
    """Name of the implementation that moves rows of a pool `[rows, row]`."""
    return implementation_of_moves(name, [pool], [pool.shape[1]], [pool.shape[1]])


@pytest.fixture
def on(monkeypatch):
    """Makes programs be traced for a device."""
    return lambda target: monkeypatch.setattr(implementations, "traced_for", lambda: target)


@pytest.mark.skipif(cases.ON_GPU, reason="there is a GPU here")
@pytest.mark.parametrize(
    ("name", "needs"), [("mosaic", r"a Hopper GPU \(compute capability 9.0\) or later"), ("pallas_triton", "a GPU")]
)
@pytest.mark.parametrize("operation", ["write", "gather", "copy_blocks"])
def test_a_kernel_without_its_gpu_says_what_it_needs(name, needs, operation):
    layout = programs.LAYOUTS["LBNHC"]
    pool, ids = jnp.zeros(layout.end, jnp.uint8), np.int32([1])
    values = {
        part: np.zeros((1, *shape.shape[1:]), shape.dtype) for part, shape in programs.values_of(layout, 1).items()
    }
    with pytest.raises(HKVError, match=f"implementation = '{name}': expected {needs}, not cpu .*'auto'"):
        programs.OPERATIONS[operation](layout, name, pool, ids, values, None)
    assert not pool.is_deleted()


def test_mosaic_on_a_gpu_before_hopper(on):
    on(A100)
    with pytest.raises(
        ConfigError, match=r"implementation = 'mosaic': expected a Hopper GPU.*not gpu \(NVIDIA A100, 8.0\)"
    ):
        implementation_of_rows("mosaic", BULK)
    assert implementation_of_rows("pallas_triton", BULK) == "pallas_triton"


def test_runs_that_bulk_copies_cannot_move(on):
    on(H200)
    assert implementation_of_rows("mosaic", BULK) == "mosaic"
    with pytest.raises(ConfigError, match=r"implementation = 'mosaic': expected .* not runs of 1 x 132 bytes"):
        implementation_of_rows("mosaic", INDEXER)


@pytest.mark.parametrize(
    ("target", "pool", "expected"),
    [
        (CPU, BULK, "xla"),
        (A100, BULK, "pallas_triton"),
        (H200, BULK, "mosaic"),
        (DESCRIBED, BULK, "mosaic"),
        (H200, INDEXER, "pallas_triton"),
        (H200, jax.ShapeDtypeStruct((2**31 // 132 + 1, 132), np.uint8), "xla"),
        (H200, jax.ShapeDtypeStruct((2**31 // 4096 + 1, 4096), np.uint8), "mosaic"),
        (H200, SMALL, "pallas_triton"),
    ],
)
def test_auto(on, target, pool, expected):
    on(target)
    assert implementation_of_rows("auto", pool) == expected
    assert implementation_of_rows(None, pool) == "xla"


def test_what_is_reported_for_a_layout(on):
    layout = programs.LAYOUTS["656 bytes"]
    pool = jax.ShapeDtypeStruct((programs.paged_program(layout, "xla").pool_bytes,), np.uint8)
    everywhere = paged.implementations_of(pool, layout)
    assert set(everywhere) == set(programs.OPERATIONS)
    assert {name for parts in everywhere.values() for name in parts.values()} == {"xla"}
    on(H200)
    found = paged.implementations_of(pool, layout, "auto")
    assert set(found["write"].values()) == {"pallas_triton"}
    assert found["copy_blocks"] == {"cell": "mosaic"}
    with pytest.raises(ConfigError, match="implementation = 'mosaic'"):
        paged.implementations_of(pool, layout, "mosaic")


def test_the_device_that_is_traced_for():
    assert cases.ON_GPU or traced_for() == CPU
    with jax.sharding.use_abstract_mesh(programs.gpu_mesh()):
        assert traced_for() == DESCRIBED
    with jax.default_device("cpu"):
        assert traced_for() == CPU
    with jax.default_device(jax.devices("cpu")[0]):
        assert traced_for() == CPU

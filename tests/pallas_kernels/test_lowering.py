"""Every kernel and operation lowers to CUDA on a machine that has no GPU: of layouts, those that kernels differ on.

`tests/slow/test_pallas_kernels.py` goes through the other layouts and dtypes.
"""

from __future__ import annotations

import re

import jax
import pytest

from hkv import paged
from hkv.errors import ConfigError
from tests.pallas_kernels import cases, programs

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

CALL = re.compile(r"custom_call @(mosaic_gpu|__gpu\$xla.gpu.triton)")

TRITON = "__gpu$xla.gpu.triton"


def calls(program):
    """Kernels that a lowered program calls; nothing moves pages but kernels."""
    text = programs.lowered(program).as_text()
    assert "stablehlo.gather" not in text
    assert "stablehlo.scatter" not in text
    return CALL.findall(text)


LAYOUTS = ("LBNHC", "132 bytes", "656 bytes")


def check_paged_operations(name, kernel):
    """A program of all operations on one layout calls the kernels that it should."""
    found = calls(programs.paged_program(programs.LAYOUTS[name], kernel, *programs.OPERATIONS))
    # A copy that may overlap is read and then written; everything else is one launch, whatever the number of parts.
    # With `auto`, whole planes are bulk copies of their own, next to what lies in small pieces.
    assert 6 <= len(found) <= (9 if kernel == "auto" and name in ("132 bytes", "656 bytes") else 6)
    assert set(found) <= {"mosaic_gpu", "__gpu$xla.gpu.triton"} if kernel == "auto" else {"__gpu$xla.gpu.triton"}
    assert kernel != "auto" or "mosaic_gpu" in found


@pytest.mark.parametrize("kernel", programs.KERNELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_paged_operations(name, kernel):
    check_paged_operations(name, kernel)


def test_a_kernel_that_is_named_is_the_one_that_is_called():
    found = calls(programs.paged_program(programs.LAYOUTS["LBNHC"], "mosaic", *programs.OPERATIONS))
    assert set(found) == {"mosaic_gpu"}


@pytest.mark.parametrize("layout", ["132 bytes", "656 bytes"])
def test_runs_that_a_named_kernel_cannot_move_are_refused(layout):
    with pytest.raises(
        ConfigError, match=r"implementation = 'mosaic': expected runs that bulk copies can move.*'auto'"
    ):
        calls(programs.paged_program(programs.LAYOUTS[layout], "mosaic", "write"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", programs.OPERATIONS)
def test_the_kernels_that_are_reported_are_called(layout, operation):
    program = programs.paged_program(programs.LAYOUTS[layout], "auto", operation)
    with jax.sharding.use_abstract_mesh(programs.gpu_mesh()):
        reported = paged.implementations_of(program.arguments[0], programs.LAYOUTS[layout], "auto")[operation]
    names = {"mosaic": "mosaic_gpu", "pallas_triton": "__gpu$xla.gpu.triton"}
    assert set(calls(program)) == {names[name] for name in reported.values()}


@pytest.mark.parametrize("kernel", programs.KERNELS)
@pytest.mark.parametrize("direction", ["pack", "unpack"])
@pytest.mark.parametrize("name", programs.GROUPS)
def test_chunk_transfers(name, direction, kernel):
    found = calls(programs.chunk_program(programs.GROUPS[name], kernel, direction))
    # Values and scales of an indexer are runs of 128 and 4 bytes: bulk copies leave them to registers.
    apart = kernel == "auto" and name == "latents and indexer"
    small = kernel == "pallas_triton" or name == "heads first, blocks padded"
    assert len(found) == (2 if apart else 1), "pages of all groups and layers move in one launch"
    assert set(found) == ({"mosaic_gpu", TRITON} if apart else {TRITON if small else "mosaic_gpu"})

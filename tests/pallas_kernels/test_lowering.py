"""Every kernel, operation, layout and dtype lowers to CUDA on a machine that has no GPU."""

from __future__ import annotations

import re

import pytest

from tests.pallas_kernels import cases, programs

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

CALL = re.compile(r"custom_call @(mosaic_gpu|__gpu\$xla.gpu.triton)")


def calls(program):
    """Kernels that a lowered program calls; nothing moves pages but kernels."""
    text = programs.lowered(program).as_text()
    assert "stablehlo.gather" not in text
    assert "stablehlo.scatter" not in text
    return CALL.findall(text)


@pytest.mark.parametrize("kernel", programs.KERNELS)
@pytest.mark.parametrize("layout", programs.LAYOUTS.values(), ids=programs.LAYOUTS)
def test_paged_operations(layout, kernel):
    found = calls(programs.paged_program(layout, kernel, *programs.OPERATIONS))
    parts = len(layout.content)
    # A copy is a gather and a scatter; a write of all parts of a cell is one launch.
    assert 5 + parts <= len(found) <= 3 + 3 * parts
    assert set(found) <= {"mosaic_gpu", "__gpu$xla.gpu.triton"} if kernel == "mosaic" else {"__gpu$xla.gpu.triton"}
    assert kernel != "mosaic" or "mosaic_gpu" in found


@pytest.mark.parametrize("kernel", programs.KERNELS)
@pytest.mark.parametrize("direction", ["pack", "unpack"])
@pytest.mark.parametrize(("geometries", "launches", "writes"), programs.GROUPS.values(), ids=programs.GROUPS)
def test_chunk_transfers(geometries, launches, writes, direction, kernel):
    found = calls(programs.chunk_program(geometries, kernel, direction))
    assert found == [{"mosaic": "mosaic_gpu", "pallas_triton": "__gpu$xla.gpu.triton"}[kernel]] * (
        launches + (writes if direction == "pack" else 0)
    )

"""Recorded programs keep the limits, the page is made of them, and programs are lowered to the launches recorded."""

from __future__ import annotations

import re

import jax
import pytest

from tests.compiled_code import cases, record, tables
from tests.pallas_kernels import programs
from tests.pallas_kernels.cases import DEPRECATED

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

VERSIONS, RECORDS = record.load()
CASES = {case.name: case for case in cases.all_cases()}
KERNEL = re.compile(r"custom_call @(mosaic_gpu|__gpu\$xla.gpu.triton)")
SAMPLE = ("LBNHC", "32 layers", "K and V apart in each layer")
LOWERED = [
    name for name, case in CASES.items() if case.implementation in ("xla", "pallas_triton") and case.layout in SAMPLE
]
"""A sample: all operations, in a form that is lowered without the plugin in a fraction of a second."""


def test_every_program_is_recorded():
    assert set(RECORDS["sm_90"]) == set(CASES)
    assert set(RECORDS["sm_80"]) < set(CASES)


def test_nothing_recorded_breaks_a_limit():
    assert tables.all_problems(RECORDS) == []


def test_every_operation_moves_each_byte_once_in_some_implementation():
    best: dict[str, float] = {}
    for name, found in RECORDS["sm_90"].items():
        if not found.refused:
            operation = CASES[name].operation
            best[operation] = min(found.ratio, best.get(operation, 9.0))
    assert {operation for operation, ratio in best.items() if ratio > record.LIMIT} == {"copy_blocks"}
    assert best["copy_blocks, disjoint"] <= record.LIMIT


def test_every_exception_is_one():
    excepted = {
        (operation, which)
        for operation, which in record.EXCEPTIONS
        for name, found in RECORDS["sm_90"].items()
        if CASES[name].operation == operation
        and which in ("", CASES[name].implementation, CASES[name].layout)
        and found.ratio > record.LIMIT
    }
    assert excepted == set(record.EXCEPTIONS)


def test_kernels_use_16_bytes_wherever_rows_allow():
    narrow = {
        CASES[name].layout
        for name, found in RECORDS["sm_90"].items()
        if CASES[name].implementation in ("mosaic", "pallas_triton", "triton") and 0 < found.store < 16
    }
    assert narrow <= {"132 bytes", "latents and indexer"}


def test_a_decode_write_has_as_many_launches_for_32_layers_as_for_2():
    for code in cases.IMPLEMENTATIONS:
        few, many = (RECORDS["sm_90"][f"write_step, {name}, {code}"] for name in ("LBNHC", "LBNHC of 32 layers"))
        assert few.launches == many.launches
        assert few.moving == many.moving


def test_the_page_is_made_of_what_is_recorded():
    assert tables.text(RECORDS) in tables.PAGE.read_text(encoding="utf-8")


@pytest.mark.skipif(VERSIONS["jax"] != jax.__version__, reason="recorded with another release of JAX")
@pytest.mark.parametrize("name", LOWERED)
def test_programs_are_lowered_to_the_launches_recorded(name):
    """Without the plugin: kernels that are called, or gathers and scatters that XLA fuses, one launch for each."""
    case = CASES[name]
    text = programs.lowered(case.program).as_text()
    kernels = len(KERNEL.findall(text))
    moves = max(len(re.findall(rf'"stablehlo\.{kind}"', text)) for kind in ("gather", "scatter"))
    moving = RECORDS["sm_90"][name].moving
    if case.implementation != "xla":
        assert kernels == moving
        assert moves == 0
    else:
        assert kernels == 0
        # Gathers of two parts may share a fusion, and one that is not fused into a scatter, a copy's, has its own.
        assert moves <= 2 * moving
        assert moving <= 2 * moves


def test_a_regression_breaks_a_limit():
    case = CASES["write, LBNHC, xla"]
    fine = RECORDS["sm_90"][case.name]
    assert record.problems(case, fine) == []
    for worse in (
        {"ratio": 1.06},
        {"atomics": ("atom.global.cas.b32",)},
        {"copies": ("copy u8[4194304]",)},
        {"spilled": 8},
        {"refused": "runs that bulk copies cannot move"},
    ):
        assert record.problems(case, record.Record(**{**record.kept(fine), **worse})) != []
        assert tables.differences({"sm_90": {case.name: fine}}, {"sm_90": {case.name: record.Record(**worse)}}) != []

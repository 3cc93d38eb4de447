"""Programs compiled by JAX's CUDA plugin and Triton against what is recorded: `.ci/peers` runs this."""

from __future__ import annotations

import dataclasses

import pytest

from tests.compiled_code import cases, hlo, record
from tests.compiled_code.__main__ import GPUS, is_of
from tests.pallas_kernels import programs
from tests.pallas_kernels.cases import DEPRECATED

pytestmark = [
    pytest.mark.cuda_plugin,
    pytest.mark.triton,
    pytest.mark.jax_triton,
    pytest.mark.filterwarnings(DEPRECATED),
    pytest.mark.filterwarnings("ignore"),
]

GROUPS = sorted({(gpu, case.operation, case.layout) for gpu in GPUS for case in cases.all_cases() if is_of(gpu, case)})


@pytest.mark.parametrize(("gpu", "operation", "layout"), GROUPS, ids=[", ".join(group) for group in GROUPS])
def test_programs_compile_to_what_is_recorded(gpu, operation, layout):
    recorded = record.load()[1][gpu]
    for case in cases.all_cases():
        if is_of(gpu, case) and (case.operation, case.layout) == (operation, layout):
            found = record.record_of(case, gpu)
            assert record.problems(case, found) == []
            assert record.kept(found) == record.kept(recorded[case.name]), case.name


def test_an_undonated_pool_is_copied():
    """The search for copies sees one where there has to be one."""
    from tests.compiled_code import compiler

    (case,) = (case for case in cases.all_cases() if case.name == "write, LBNHC, pallas_triton")
    kept = dataclasses.replace(case, program=case.program._replace(donated=()))
    assert hlo.whole_copies(compiler.compile_for("sm_90", kept.program).hlo, kept.program.pool_bytes) != []


def test_a_scatter_that_may_meet_an_index_twice_is_compare_and_swap():
    """The search for atomics sees them where XLA has to use them."""
    import jax
    import numpy as np

    from tests.compiled_code import compiler

    arguments = [jax.ShapeDtypeStruct((4096,), np.uint8), programs.int32(64), jax.ShapeDtypeStruct((64,), np.uint8)]
    program = programs.Program(lambda pool, ids, new: pool.at[ids].add(new), tuple(arguments), (0,), 4096)
    assert any(kernel.atomics for kernel in compiler.compile_for("sm_90", program).kernels)

"""`move_runs` of every implementation against its twin in loops, bit for bit, kernels interpreted on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference.paged.moves as reference
from hkv.paged.implementations import choose
from pallas_kernels.move import pallas_triton
from pallas_kernels.move.moves import Move
from tests.pallas_kernels import cases

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

OLD_JAX = jax.__version_info__ < (0, 11)
UNITS = 12
"""Units of every array."""

WRONG = (-1, -(2**31), UNITS, 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Static part of a move: source and target by number, units of a run, tables that are missing."""

    source: int | None
    target: int
    runs: int
    units: int
    read: bool = True
    written: bool = True
    zeros: bool = False
    own: bool = False


PLANS = {
    "pages to an object": (32, np.uint32, (Kind(0, 0, 3, 2), Kind(1, 0, 2, 1))),
    "an object to pages": (64, np.uint16, (Kind(0, 0, 3, 2), Kind(0, 1, 4, 1))),
    "keys and values to a page": (33, np.uint8, (Kind(0, 0, 4, 1, read=False), Kind(1, 0, 3, 2, read=False))),
    "pages to pages of the same pool": (128, np.uint8, (Kind(None, 0, 3, 1, own=True), Kind(0, 1, 2, 3))),
    "zeros": (32, np.uint32, (Kind(None, 0, 3, 2), Kind(0, 0, 3, 1, zeros=True))),
    "runs of more than a tile": (704, np.uint32, (Kind(0, 0, 2, 2), Kind(1, 1, 3, 1, read=False))),
}
BULK = (
    "pages to an object",
    "an object to pages",
    "pages to pages of the same pool",
    "zeros",
    "runs of more than a tile",
)
MADE = {
    "parts of pages, gathered": (32, np.uint32, (Kind(0, 0, 4, 1, written=False), Kind(0, 1, 3, 2, written=False))),
    "bytes, gathered": (132, np.uint8, (Kind(0, 0, 5, 1, written=False), Kind(1, 1, 2, 3, written=False))),
}


def moves_of(kinds, tables, unit):
    pairs = zip(tables[::2], tables[1::2], strict=True)
    return [
        Move(kind.source, kind.target, read, written, kind.runs, unit, kind.units * unit, kind.zeros, kind.own)
        for kind, (read, written) in zip(kinds, pairs, strict=True)
    ]


@st.composite
def tables_of(draw, kinds):
    """Starts of which no two runs that are written overlap, nor, within one array, one that is read."""
    tables, taken = [], {0: set(), 1: set()}
    for kind in kinds:
        starts = st.one_of(st.integers(0, UNITS - 1), st.sampled_from(WRONG))
        read = np.int32(draw(st.lists(starts, min_size=kind.runs, max_size=kind.runs)))
        written = []
        for run in range(kind.runs):
            busy = set(taken[kind.target])
            if kind.own:
                busy |= {unit for start in read for unit in range(int(start), int(start) + kind.units)}
            free = [s for s in range(UNITS - kind.units + 1) if not busy & set(range(s, s + kind.units))]
            wrong = [*WRONG, *([UNITS - 1] if kind.units > 1 else [])]
            start = draw(st.sampled_from(free) if free and draw(st.integers(0, 3)) else st.sampled_from(wrong))
            if start in free:
                taken[kind.target] |= set(range(start, start + kind.units))
            written.append(start)
            del run
        tables += [read if kind.read else None, np.int32(written) if kind.written else None]
    return tables


def run_plan(implementation, plan, made):
    unit, dtype, kinds = plan
    sizes = {kind.target: kind.runs * kind.units * unit for kind in kinds}

    @jax.jit
    def moved(sources, targets, tables):
        given = [jax.ShapeDtypeStruct((sizes[t],), dtype) for t in range(2)] if made else targets
        return choose(implementation).move_runs(sources, given, moves_of(kinds, tables, unit))

    kinds = tuple(dataclasses.replace(kind, zeros=True) for kind in kinds) if made else kinds

    @given(tables_of(kinds), st.integers(0, 2**32 - 1))
    @settings(max_examples=4 if implementation.startswith("mosaic") else 12)
    def check(tables, seed):
        arrays = [cases.random_words((UNITS * unit,), dtype, seed + index) for index in range(4)]
        expected = [np.zeros(sizes[t], dtype) for t in range(2)] if made else [array.copy() for array in arrays[2:]]
        reference.move_runs(arrays[:2], expected, moves_of(kinds, tables, unit))
        found = moved(arrays[:2], arrays[2:], tables)
        assert [cases.bits(array) for array in found] == [cases.bits(array) for array in expected]

    check()


PAGE = 4
"""Units of a page, of three pages."""


def starts_by_page(length):
    """Page and unit of a run, of one that exists or not."""
    page = st.one_of(st.integers(0, UNITS // PAGE - 1), st.sampled_from([-1, 3, 2**31 - 1]))
    return st.tuples(page, st.integers(0, PAGE - length))


@given(st.data(), st.sampled_from([1, 2]), st.booleans(), st.booleans())
@settings(max_examples=40)
def check_pages(data, length, zeros, own):
    """Runs of two units at most, found by page, from one array into another or within one."""
    read = np.int32(data.draw(st.lists(starts_by_page(length), min_size=3, max_size=3)))
    busy, written = [], []
    for start in data.draw(st.lists(starts_by_page(length), min_size=3, max_size=3)):
        near = [other for other in (*busy, *(read.tolist() if own else ())) if other[0] == start[0]]
        taken = any(abs(other[1] - start[1]) < length for other in near)
        written.append((-1, 0) if taken else start)
        busy.append(written[-1])
    tables = read, np.int32(written)
    move = by_page(*tables, length, zeros and not own, own)
    arrays = [cases.random_words((UNITS * 8,), np.uint32, seed) for seed in range(2)]
    expected = [arrays[1].copy()]
    reference.move_runs(arrays[:1], expected, [move])

    (found,) = move_by_page(*arrays, *tables, length, zeros and not own, own)
    assert cases.bits(found) == cases.bits(expected[0])


def by_page(read, written, length, zeros, own):
    return Move(None if own else 0, 0, read, written, 3, 8, 8 * length, zeros, own, PAGE)


@functools.partial(jax.jit, static_argnames=("length", "zeros", "own"))
def move_by_page(source, target, read, written, length, zeros, own):
    return choose("xla").move_runs([source], [target], [by_page(read, written, length, zeros, own)])


def test_runs_by_page():
    check_pages()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", ["xla", cases.runnable("pallas_triton")])
def test_runs_that_are_quantised(implementation, dtype):
    numbers = np.random.default_rng(2).integers(-300, 300, 6 * 32).astype(np.float32) / 2
    scales, written = np.float32([1, 0.5, 2, 1, 0.25, 1]), np.int32([3, -1, 0, 5, 8, 7])
    move = Move(0, 0, None, written, 6, 32, 32, reciprocal=scales, dtype=dtype)
    expected = [cases.random_words((8 * 32,), np.uint8, 1)]
    (found,) = jax.jit(lambda given, pool: choose(implementation).move_runs([given], [pool], [move]))(
        numbers, expected[0].copy()
    )
    reference.move_runs([numbers], expected, [move])
    assert cases.bits(found) == cases.bits(expected[0])


INTERPRETED = ("xla", cases.runnable("pallas_triton"))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_moves(implementation, name):
    run_plan(implementation, PLANS[name], made=False)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_moves_to_arrays_that_are_made(implementation, name):
    run_plan(implementation, MADE[name], made=True)


def test_bulk_copies_to_arrays_that_are_made():
    run_plan(cases.runnable("mosaic"), MADE["parts of pages, gathered"], made=True)


@pytest.mark.parametrize("name", BULK)
def test_bulk_copies(name):
    if OLD_JAX:
        pytest.skip("JAX 0.10 cannot interpret a Mosaic GPU kernel that writes through a reference (KeyError: None)")
    run_plan(cases.runnable("mosaic"), PLANS[name], made=False)


def move_of(implementation, name):
    """Check by which defects of a kernel are judged (`tests/mutants`): a plan that has a name."""
    plans = {**PLANS, **MADE}
    run_plan(implementation, plans[name], made=name in MADE)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_moves_of_different_units(implementation):
    check_units(implementation)


def check_units(implementation):
    """Starts of one move count 4 words and those of another 12, in the same pool."""
    moves = [
        Move(0, 0, np.int32([5, 1]), np.int32([0, 38]), 2, 4, 8),
        Move(0, 0, np.int32([2, 11]), np.int32([1, 5]), 2, 12, 12),
    ]
    source, target = (cases.random_words((156,), np.uint32, seed) for seed in (0, 1))
    expected = [target.copy()]
    reference.move_runs([source], expected, moves)
    (found,) = jax.jit(lambda source, target: choose(implementation).move_runs([source], [target], moves))(
        source, target
    )
    assert cases.bits(found) == cases.bits(expected[0])


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_more_moves_than_a_launch_takes(implementation):
    """Two full launches and a rest. Launches are made small: a move is a branch of the program, and takes its time."""
    moves = [Move(0, 0, np.int32([i]), np.int32([9 - i]), 1, 4, 4) for i in range(10)]
    source, target = cases.random_words((40,), np.uint32, 0), np.zeros(40, np.uint32)
    expected = [target.copy()]
    reference.move_runs([source], expected, moves)
    with mock.patch.object(pallas_triton, "MAX_MOVES", 4):
        moved = jax.jit(lambda source, target: choose(implementation).move_runs([source], [target], moves))
        (found,) = moved(source, target)
    assert cases.bits(found) == cases.bits(expected[0])


def of_two_units() -> list[Move]:
    """Moves of groups of head sizes 96 and 128 in one pool: rows of a launch of both are 32 bytes."""
    return [
        Move(0, 0, np.int32([5, 1]), np.int32([0, 30]), 2, 24, 48),
        Move(0, 0, np.int32([2, 11]), np.int32([3, 5]), 2, 32, 32),
    ]


def test_rows_are_counted_in_32_bits() -> None:
    """A pool of 68.7 GB has 2^31 rows of 32 bytes: groups of two units get a launch each, with rows of their own."""
    words = 24 * 32 * ((1 << 31) // 96 + 1)
    pool = jax.ShapeDtypeStruct((words,), np.uint32)
    source = jax.ShapeDtypeStruct((24 * 32 * 4,), np.uint32)
    traced = jax.make_jaxpr(lambda *arrays: pallas_triton.move_runs([arrays[0]], [arrays[1]], of_two_units()))
    shapes = [
        [each.aval.shape for each in (*equation.invars, *equation.outvars)]
        for equation in traced(source, pool).eqns
        if equation.primitive.name == "pallas_call"
    ]
    assert len(shapes) == 2
    assert all(max(shape) < 1 << 31 for call in shapes for shape in call if shape)
    beyond = jax.ShapeDtypeStruct((8 << 31,), np.uint32)
    with pytest.raises(ValueError, match="rows of 4 words: expected at most"):
        jax.eval_shape(
            lambda pool: pallas_triton.move_runs([], [pool], [Move(None, 0, None, np.int32([1]), 1, 4, 4)]), beyond
        )


def test_a_launch_a_unit_moves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = (np.random.default_rng(n).integers(0, 1 << 32, 24 * 32 * 4, dtype=np.uint32) for n in (1, 2))
    expected = [target.copy()]
    reference.move_runs([source], expected, of_two_units())
    monkeypatch.setattr(pallas_triton, "MOST_ROWS", 200)  # of 8 words there are 384, of 24 128, of 32 96
    launches = mock.Mock(wraps=pallas_triton._launch)
    monkeypatch.setattr(pallas_triton, "_launch", launches)
    (found,) = pallas_triton.move_runs([source], [jax.numpy.asarray(target)], of_two_units(), interpret=True)
    assert np.array_equal(found, expected[0])
    assert launches.call_count == 2

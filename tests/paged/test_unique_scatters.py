"""Scatters of bytes say that no two of their indices are equal, and keep that promise for runs that move nothing."""

from __future__ import annotations

import re
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv import paged
from hkv.layout.strided import StridedView
from hkv.layout.views import jax as jax_views
from hkv.layout.views.runs import ROW_LIMIT, distinct_starts
from tests.pallas_kernels import cases, programs

SCATTER = re.compile(r'"stablehlo.scatter".*unique_indices = (\w+)')


def promises(text):
    return SCATTER.findall(text)


@pytest.mark.parametrize("operation", ["write", "scatter", "copy_blocks", "zero_blocks"])
def test_paged_operations(operation):
    layout = programs.LAYOUTS["656 bytes"]
    found = promises(programs.lowered(programs.paged_program(layout, "xla", operation)).as_text())
    assert found == ["true"] * (len(layout.content) if operation == "scatter" else 1)


@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_chunk_transfers(direction):
    geometries = programs.GROUPS["K and V apart in each layer"]
    found = promises(programs.lowered(programs.chunk_program(geometries, "xla", direction)).as_text())
    assert found == ["true"] * 3  # one for each layer


def test_views():
    view = StridedView((4, 8), (8, 1), 0, "uint8")
    arguments = (np.zeros(32, np.uint8), np.int32([1, 5, -1]), np.zeros((3, 8), np.uint8))
    lowered = jax.jit(lambda pool, ids, new: jax_views.write_blocks(pool, view, ids, new)).lower(*arguments)
    assert promises(lowered.as_text()) == ["true"]


def test_a_scatter_that_promises_nothing_is_seen():
    text = jax.jit(lambda x, i: x.at[i].set(1, mode="drop")).lower(np.zeros(8, np.uint8), np.int32([1, 2])).as_text()
    assert promises(text) == ["false"]


DISTINCT = jax.jit(distinct_starts, static_argnums=1)


@given(cases.scatter_starts(1, 3, 2, 2), st.sampled_from([cases.NUM_ROWS, ROW_LIMIT]))
def test_starts_of_runs_that_are_dropped_are_distinct_and_outside(starts, num_rows):
    last = num_rows - 2
    found = np.asarray(DISTINCT(starts, last))
    inside = (starts >= 0) & (starts <= last)
    kept = starts[inside]
    assert len(set(found.ravel().tolist())) == found.size - (kept.size - len(set(kept.tolist())))
    assert np.array_equal(found[inside], kept)
    assert np.all(found[~inside] < 0)


CALLS = {
    "write": lambda pool, layout, values: paged.write.__wrapped__(
        pool, layout, np.int32(0), np.int32([1, -1, 9, -1]), np.int32([0, 0, 0, 7]), values
    ),
    "copy_blocks": lambda pool, layout, values: paged.copy_blocks.__wrapped__(
        pool, layout, np.int32([1, -1, -1, 9]), np.int32([2, 2, -1, 3])
    ),
    "zero_blocks": lambda pool, layout, values: paged.zero_blocks.__wrapped__(pool, layout, np.int32([2, -1, 2, 9, 2])),
}
"""Calls that move one thing, and name what moves nothing, or what is moved already, again and again."""


def with_starts(function, *arguments):
    """Result of a function, and the starts of the one scatter in it."""
    seen, real = [], jax.lax.scatter

    def scatter(pool, starts, *rest, **named):
        seen.append(starts)
        return real(pool, starts, *rest, **named)

    def traced(*arguments):
        found = function(*arguments)
        (starts,) = seen
        return found, starts

    with mock.patch.object(jax.lax, "scatter", scatter):
        found, starts = jax.jit(traced)(*arguments)
    return found, np.asarray(starts).ravel()


@pytest.mark.parametrize("operation", CALLS)
def test_no_operation_breaks_the_promise(operation):
    layout = programs.LAYOUTS["LBNHC"]
    values = {name: np.zeros(shape.shape, shape.dtype) for name, shape in programs.values_of(layout, 4).items()}
    pool = np.ones(layout.end, np.uint8)
    _, found = with_starts(lambda pool, values: CALLS[operation](pool, layout, values), pool, values)
    assert len(set(found.tolist())) == found.size
    assert 0 < np.sum(found >= 0) < found.size


@pytest.mark.parametrize("rows", [[4, 4, 9, -1, 4, -7, 9], [], [-1, -1]])
def test_rows_of_views_that_are_dropped_are_distinct(rows):
    """Also where the same row that does not exist is named again and again."""
    view = StridedView((4, 8), (8, 1), 0, "uint8")
    pool, values = cases.random_words((32,), np.uint8, 0), np.ones((len(rows), 8), np.uint8)
    kept, found = with_starts(
        lambda pool, values: jax_views.write_blocks(pool, view, np.int32(rows), values), pool, values
    )
    assert cases.bits(kept) == cases.bits(pool)
    assert len(set(found.tolist())) == found.size == len(rows)

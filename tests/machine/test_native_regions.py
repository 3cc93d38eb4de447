"""Programs in regions: results, what XLA is told, and what it must not be left without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hkv.machine.native_regions import MARKS, Dispatched

SIZE = 8


@jax.jit
def inner(table, rows):
    """A function of its own, with a scatter between other work."""
    table = table.at[rows % SIZE].add(rows * 3)
    return table, (table[::-1] * 2 + rows).astype(jnp.uint32)


def program(table, rows):
    """All that regions are made around: scatters, inner functions, conditionals, loops, and what nobody reads."""
    before = table[rows % SIZE] + jnp.arange(SIZE)
    unread = jnp.cumsum(before * 7)
    del unread
    table, mixed = inner(table, before - rows)
    table = lax.cond(rows[0] > 3, lambda t: t.at[0].set(t[1] - t[2]), lambda t: t * 2 + 1, table)

    def trip(carried):
        at, now = carried
        return at + 1, now.at[at].set(now[at - 1] ^ jnp.bitwise_count(now).sum().astype(jnp.int32))

    at, table = lax.while_loop(lambda carried: carried[0] < 5, trip, (jnp.int32(0), table))
    return table, {"mixed": mixed, "at": at, "odd": (table + before) % 2 == 1, "seven": jnp.int32(7)}


def drawn(seed: int) -> tuple[jax.Array, jax.Array]:
    choices = np.random.default_rng(seed)
    table, rows = choices.integers(-50, 50, (2, SIZE)).astype(np.int32)
    return jnp.asarray(table), jnp.asarray(rows)


@pytest.mark.parametrize("seed", range(4))
def test_regions_compute_the_same(seed: int) -> None:
    table, rows = drawn(seed)
    expected = jax.device_get(program(table, rows))
    found = Dispatched(program)(table, rows)
    assert table.is_deleted()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def test_only_cpus_are_told_of_regions() -> None:
    traced = Dispatched(program).trace(*drawn(0))
    (mark,) = set(MARKS) - {"inlineable"}
    assert traced.lower(lowering_platforms=("cpu",)).as_text().count(mark) > 2
    for platform in ("cuda", "tpu"):
        assert mark not in traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_region_may_have_arguments_that_xla_can_do_without() -> None:
    """Without a use that XLA sees, it aborts on such a parameter."""

    def needless(table, rows):
        table = table.at[rows % SIZE].set(rows)
        return (table * 2 + rows * 0 - table).at[0].add(1), (table & 0) + jnp.minimum(rows, rows)

    table, rows = drawn(1)
    expected = jax.device_get(needless(table, rows))
    for mine, other in zip(Dispatched(needless)(table, rows), expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_inside_another_program_it_is_the_function_itself() -> None:
    table, rows = drawn(2)
    expected = jax.device_get(program(table, rows)[0])
    inside = jax.jit(lambda *given: Dispatched(program)(*given)[0])
    np.testing.assert_array_equal(inside(table, rows), expected)
    assert not any(mark in inside.lower(table, rows).as_text() for mark in MARKS)
    with jax.disable_jit():
        np.testing.assert_array_equal(Dispatched(program)(table, rows)[0], expected)


def test_what_a_scatter_changes_is_read_before_it() -> None:
    """Two scatters, of which one waits for a read of the other's array that needs its result."""

    def crossed(table, rows):
        table, other = table[:SIZE], table[SIZE:]
        late = other.at[rows % SIZE].add(1)
        seen = table[late % SIZE] + rows
        return jnp.concatenate([table.at[rows % SIZE].set(7), late]), seen

    table, rows = drawn(3)
    both = jnp.concatenate([table, rows])
    expected = jax.device_get(crossed(both, rows))
    for mine, other in zip(Dispatched(crossed)(both, rows), expected, strict=True):
        np.testing.assert_array_equal(mine, other)

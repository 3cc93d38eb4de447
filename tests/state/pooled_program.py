"""Rows of operations on the pooled state, performed in order by one compiled program, for tests of its mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.state.loops import Scalar, loop, read, when
from hkv.state.pooled import PooledBuckets, PooledState
from hkv.state.pooled_workspace import ARRAYS, PooledSizes, PooledWorkspace

STEPS = 64
"""Rows of a program."""

Step = Callable[[PooledWorkspace, Scalar, Scalar, tuple[Scalar, Scalar, Scalar]], PooledWorkspace]
"""One operation: the workspace, whether it is asked for, the place of its answer in `results`, the row's arguments."""


class PooledProgram:
    """Performs rows of `(code, a, b, c)`, at most `STEPS` of them; `writes` are arrays that the steps write, but
    `results`.
    """

    def __init__(self, buckets: PooledBuckets, steps: Mapping[int, Step], writes: tuple[str, ...]) -> None:
        self._buckets, self._steps, self._writes = buckets, steps, (*writes, "results")
        self._compiled = jax.jit(self._perform)

    def run(self, state: PooledState, rows: Sequence[tuple[int, ...]]) -> tuple[PooledState, list[int]]:
        """The state after the rows, and what each answered."""
        table = np.full((STEPS, 4), -1, np.int32)
        for place, row in zip(table, rows, strict=False):
            place[: len(row)] = row
        state, answers = jax.device_get(self._compiled(state, table.reshape(-1)))
        return state, answers[: len(rows)].tolist()

    def _perform(self, state: PooledState, table: jax.Array) -> tuple[PooledState, jax.Array]:
        arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
        zero = jnp.int32(0)
        fields: dict[str, Any] = {"ids": zero, "lane": zero, "num_ids": zero}
        sizes, answers = PooledSizes(self._buckets, 1, STEPS, 1, 0), jnp.zeros(STEPS + 1, jnp.int32)
        work = PooledWorkspace(sizes, **arrays, **fields, results=answers)

        def body(w: PooledWorkspace, local: tuple[Scalar]) -> tuple[PooledWorkspace, tuple[Scalar]]:
            (place,) = local
            code, *arguments = (read(table, place * 4 + column) for column in range(4))
            a, b, c = arguments
            for number, step in self._steps.items():
                asked = code == number
                w = when(asked, lambda v, on=asked, step=step: step(v, on, place, (a, b, c)), w, writes=self._writes)
            return w, (place + 1,)

        work, _ = loop(lambda c: c[0] < STEPS, body, work, (0,), writes=self._writes)
        new = {name: getattr(work, name).reshape(getattr(state, name).shape) for name in ARRAYS}
        return PooledState(**new), work.results

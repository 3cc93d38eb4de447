"""One lane's operations, performed in order."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from hkv.state.flat_arrays import FlatArrays
from hkv.state.loops import Scalar, loop, read

W = TypeVar("W", bound=FlatArrays)


class Payload(NamedTuple):
    """A lane's payload: integers, lanes one after the other; where the lane's begin; how many it has."""

    numbers: jax.Array
    base: Scalar
    size: int


One = Callable[[W, Scalar, Scalar, Scalar, Payload], W]
"""Performs one operation: the workspace, where the operation's row begins in the table, its place, its code, and the
lane's payload."""


def perform_all(
    work: W, table: jax.Array, payload: jax.Array, code: enum.IntEnum, end: int, one: One[W], writes: Sequence[str]
) -> W:
    """Performs a lane's operations up to the first with the code `end`.

    Args:
      work: the workspace; `sizes.operations` says how many rows a lane has.
      table: int32[lanes * operations * width], rows of all lanes, flat.
      payload: int32[lanes * room], likewise.
      code: the column of a row in which its code is.
      end: the code after which nothing is done.
      one: performs one operation.
      writes: arrays and counters that operations write.
    """
    size, lanes = work.sizes.operations, work.sizes.lanes
    width = table.shape[0] // (lanes * size)
    room = payload.shape[0] // lanes
    base = 0 if lanes == 1 else work.lane * (size * width)
    numbers = Payload(payload, jnp.int32(0) if lanes == 1 else work.lane * room, room)

    def code_at(place: Scalar) -> Scalar:
        inside = place < size
        found = read(table, base + jnp.where(inside, place, 0) * width + int(code))
        return jnp.where(inside, found, end)

    def body(w: W, local: tuple[Scalar, Scalar]) -> tuple[W, tuple[Scalar, Scalar]]:
        place, found = local
        return one(w, base + place * width, place, found, numbers), (place + 1, code_at(place + 1))

    start = (jnp.int32(0), code_at(jnp.int32(0)))
    return loop(lambda c: c[1] != end, body, work, start, writes=writes)[0]

"""A batch of mixed operations as arrays, whatever their columns mean, and the programs that perform it.

A dialect gives its columns and a function that performs one operation on a workspace; what is here collects operations
on the host, walks over them in one compiled loop for each lane of a batch of states, and keeps a program for each
choice of what is static.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching

from hkv.errors import OperationError
from hkv.machine import native_loops
from hkv.state.flat_arrays import FlatArrays
from hkv.state.loops import Scalar, loop, read
from hkv.state.status import Status

WIDTH = 16
"""Columns of `Operations.table`."""

LARGE = 1 << 19
"""Size from which on buckets grow by two, not by four."""

HUGE = 1 << 22
"""Size from which on they grow by an eighth of that: to fill such arrays takes longer than a replay's decisions."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations in order.

    Attributes:
      table: int32[n, 16], a row each, its columns the dialect's; the first row with code `END` and all after it do
        nothing.
      payload: int32[m], prefix keys or block ids that rows point into.
    """

    table: jax.Array
    payload: jax.Array


class OperationBatch:
    """Collects operations on the host and makes `Operations` of them, padded so that shapes repeat. Dialects derive."""

    ARGUMENTS: ClassVar[type[enum.IntEnum]]
    """Columns of a row; `CODE` and `SLOT` are among them."""

    SPAN: ClassVar[tuple[enum.IntEnum, enum.IntEnum]]
    """Columns of how many integers of the payload are an operation's, and of where they begin."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._payload: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def payload_size(self) -> int:
        """Integers of payload so far."""
        return len(self._payload)

    def add(self, code: enum.IntEnum, slot: int = 0, payload: Sequence[int] = (), **arguments: int) -> Self:
        """Adds an operation.

        Args:
          code: code of the operation.
          slot: the request slot.
          payload: the integers that it names.
          **arguments: further columns, by their names in small letters; the others are 0.
        """
        row = np.zeros(WIDTH, np.int32)
        row[self.ARGUMENTS["CODE"]], row[self.ARGUMENTS["SLOT"]] = code, slot
        for column, value in zip(self.SPAN, (len(payload), len(self._payload)), strict=True):
            row[column] = value
        for name, value in arguments.items():
            row[self.ARGUMENTS[name.upper()]] = value
        self._rows.append(row)
        self._payload.extend(payload)
        return self

    def build(self, least: int = 16, least_payload: int = 64) -> Operations:
        """The operations as NumPy arrays; both sizes are rounded up to a power of four times the least.

        Raises:
          OperationError: there are none.
        """
        if not self._rows:
            raise OperationError("operations", 0, "at least one")
        # One row more than there are operations: zeros are an `END`, at which the compiled loop stops.
        table = np.zeros((bucket(len(self._rows) + 1, least), WIDTH), np.int32)
        table[: len(self._rows)] = self._rows
        payload = np.zeros(bucket(len(self._payload), least_payload), np.int32)
        payload[: len(self._payload)] = self._payload
        return Operations(table=table, payload=payload)  # type: ignore[arg-type]


def bucket(size: int, least: int) -> int:
    """The smallest `least * 4**k` that is at least `size`; from `LARGE` on half of it, where that is enough, and from
    `HUGE` on as many eighths as are enough.

    Few sizes mean few executables, but large arrays take their time to be filled.
    """
    found = least
    while found < size:
        found *= 4
    half = found // 2
    # From here on a factor of four would fill more zeros than operations.
    found = half if max(size, least, LARGE) <= half else found
    return nearest(max(size, least), found // 8) if found > HUGE else found


def nearest(size: int, least: int) -> int:
    """The smallest multiple of `least` that is at least `size`: for arrays that another rounding makes too large."""
    return -(-size // least) * least


# One lane's operations, performed in order.

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
      payload: int32[lanes * room], lane after lane.
      code: the column of a row in which its code is.
      end: the code after which nothing is done.
      one: performs one operation.
      writes: arrays and counters that operations write.
    """
    size, lanes = work.sizes.operations, work.sizes.lanes
    width = table.shape[0] // (lanes * size)
    room = payload.shape[0] // lanes
    # A constant for one lane, as in `FlatArrays._base`.
    base = 0 if lanes == 1 else work.lane * (size * width)
    numbers = Payload(payload, jnp.int32(0) if lanes == 1 else work.lane * room, room)

    def code_at(place: Scalar) -> Scalar:
        # Lanes follow each other in one flat array: behind this lane's last row the next lane begins.
        inside = place < size
        found = read(table, base + jnp.where(inside, place, 0) * width + int(code))
        return jnp.where(inside, found, end)

    def body(w: W, local: tuple[Scalar, Scalar]) -> tuple[W, tuple[Scalar, Scalar]]:
        place, found = local
        # The next code is read here and carried: the loop's condition sees scalars only, no array.
        return one(w, base + place * width, place, found, numbers), (place + 1, code_at(place + 1))

    start = (jnp.int32(0), code_at(jnp.int32(0)))
    return loop(lambda c: c[1] != end, body, work, start, writes=writes)[0]


# Compiled forms of a dialect's function over lanes of states: jitted or not, batchable, and counted.


class Programs:
    """The programs of an `execute(parameters, state, operations, **static)`, one for each choice of what is static.

    `execute` takes its three arguments, and returns all, with a leading axis of lanes. `defaults` are static arguments
    that need not be given: `only`, the codes that a program is to know (others answer `Status.UNKNOWN_OPERATION`);
    `ids` and `events`, sizes of the outputs of block ids and of events; 0 disables one, and compiles nothing for it.
    """

    def __init__(self, execute: Callable[..., Any], **defaults: Any) -> None:
        self._execute, self._defaults = execute, defaults
        self._made: list[Any] = []
        self._batchable = functools.cache(self._make_batchable)
        self._jitted = functools.cache(self._make_jitted)

    def run(self, parameters: Any, state: Any, operations: Operations, **static: Any) -> Any:
        """Performs operations in order, in one dispatch: the new state, the old one being donated, and the results."""
        return self._jitted(**{**self._defaults, **static})(parameters, state, operations)

    def pure(self, **static: Any) -> Callable[..., Any]:
        """`run` as a function to use inside compiled functions, or to `vmap` over stacked states. It is not jitted."""
        return self._batchable(**{**self._defaults, **static})

    def _make_jitted(self, **static: Any) -> Callable[..., Any]:
        # The state is donated, and updated where it is: no pool is ever copied.
        program = jax.jit(self._batchable(**static), donate_argnums=(1,))
        self._made.append(program)
        return program

    def _make_batchable(self, **static: Any) -> Callable[..., Any]:
        """Form for a single state. Under `vmap`, states become lanes of one program, not selects over whole pools."""

        @custom_batching.custom_vmap
        def single(*arguments: Any) -> Any:
            native_loops.warn_if_interpreted()
            stacked = jax.tree.map(lambda x: jnp.expand_dims(x, 0), arguments)
            return jax.tree.map(lambda x: jnp.squeeze(x, 0), self._execute(*stacked, **static))

        @single.def_vmap
        def lanes(size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
            def stack(batched: bool, x: Any) -> Any:
                return x if batched else jnp.broadcast_to(x, (size, *jnp.shape(x)))

            native_loops.warn_if_interpreted()
            new = self._execute(*jax.tree.map(stack, tuple(in_batched), arguments), **static)
            return new, jax.tree.map(lambda _: True, new)

        return single

    def forget(self) -> None:
        """Forgets every compiled program: the next one is traced and compiled anew."""
        for program in self._made:
            program.clear_cache()
        self._made.clear()
        self._jitted.cache_clear()
        self._batchable.cache_clear()

    def count(self) -> int:
        """Number of compilations of jitted programs since `forget`."""
        return sum(program._cache_size() for program in self._made)


def check_granted(statuses: np.ndarray, **outputs: tuple[int, int]) -> None:
    """Debug mode: raises for the first operation that was refused, or that dropped ids, and when output was cut off.

    Args:
      statuses: int32[n], of the operations in order.
      **outputs: for each output by its name, entries that were to be reported, and the room for them; 0 for none.

    Raises:
      OperationError: names the operation's place in the batch and its status, or the output.
    """
    for place, status in enumerate(statuses):
        if status != Status.OK:
            raise OperationError(f"operations[{place}]", Status(int(status)).name, "an operation that is granted")
    for name, (count, room) in outputs.items():
        if room and count > room:
            raise OperationError(name, room, f"room for {count}")

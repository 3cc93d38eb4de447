"""Loops over large arrays that XLA compiles to native code, in place.

A loop here is scalar: each trip reads and writes single elements, and its trip count is data. XLA:CPU turns such a loop
into machine code of a few nanoseconds a trip, as long as no array is copied inside it. An array is copied when XLA
cannot order every read of it before the write that follows. Four rules avoid that; the functions of this module keep
the last two:

1. Within one trip, an array is written before it is read: what a trip reads of an array, the next trip writes back.
   What the next trip needs for that, it is handed as a carried scalar.
2. An array that is only written, or only read, in a trip needs no such care.
3. An array that a loop reads is also written in it, to a spare element. An array that passes through a loop untouched
   would become a constant of that loop, kept alive next to the array that a later loop writes.
4. Between loops, what was read leaves its loop as a carried scalar (`peek`), so that no later write can overtake the
   read.

Every array is flat and ends in a spare element. Indices are unsigned, in range and never wrapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Scalar: TypeAlias = Any
"""A traced int32 or bool of shape (), or a number that becomes one."""

W = TypeVar("W")
"""A workspace: a frozen dataclass of arrays, counters and a lane (`hkv.state.workspace.Workspace`)."""

Local = Any
"""A tuple of scalars that a loop carries."""

ZERO = np.int32(0)


def read(array: jax.Array, index: Any) -> Scalar:
    """The element of a flat array at a non-negative index that is in range; nothing is wrapped."""
    # Unsigned: for signed indices JAX adds the array's size to negative ones, two more operations in each access.
    start = (jnp.asarray(index).astype(jnp.uint32),)
    return lax.dynamic_slice(array, start, (1,), allow_negative_indices=False).reshape(())


def write(array: jax.Array, value: Any, index: Any) -> jax.Array:
    """The array with one element replaced; the index is in range, nothing is wrapped."""
    start = (jnp.asarray(index).astype(jnp.uint32),)
    update = jnp.asarray(value).astype(array.dtype).reshape((1,))
    return lax.dynamic_update_slice(array, update, start, allow_negative_indices=False)


def touch(array: jax.Array) -> jax.Array:
    """The array with its spare element, the last one, written."""
    return write(array, ZERO, array.shape[0] - 1)


def loop(
    condition: Callable[[Local], Scalar],
    body: Callable[[W, Local], tuple[W, Local]],
    work: W,
    local: Sequence[Any],
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> tuple[W, Local]:
    """A `while_loop` that carries exactly the named arrays and counters.

    Args:
      condition: of the carried scalars, whether to make another trip.
      body: one trip; it sees a workspace whose unnamed arrays are gone, so that forgetting a name is an error.
      work: the workspace.
      local: initial scalars; Python and NumPy integers become int32, booleans bool.
      reads: arrays the body reads but does not write; each is touched first.
      writes: arrays and counters the body writes first and then may read.
    """
    reads = work.present(reads)  # type: ignore[attr-defined]
    names = (*reads, *work.present(writes))  # type: ignore[attr-defined]

    def step(carry: tuple[tuple[jax.Array, ...], Local]) -> tuple[tuple[jax.Array, ...], Local]:
        inner = work.only(names, carry[0])  # type: ignore[attr-defined]
        for name in reads:
            # Rule 3. Without a write the array would be a constant of the loop, and the write after the loop would
            # copy it.
            inner = inner.replace(**{name: touch(getattr(inner, name))})
        inner, new = body(inner, carry[1])
        return tuple(getattr(inner, name) for name in names), scalars(new)

    values = tuple(getattr(work, name) for name in names)
    values, local = lax.while_loop(lambda carry: condition(carry[1]), step, (values, scalars(local)))
    return work.replace(**dict(zip(names, values, strict=True))), local  # type: ignore[attr-defined]


V = TypeVar("V", bound=tuple[Any, ...])
"""A tuple, named or not, of scalars."""


def guarded(
    predicate: Scalar, body: Callable[[W, V], tuple[W, V]], work: W, values: V, reads: Sequence[str] = ()
) -> tuple[W, V]:
    """`body(work, values)` where `predicate` holds, else both as they are: a `loop` of at most one trip.

    It carries the arrays, counters and values that `body` changes, which a first tracing of it finds, and `reads`. A
    program whose trips seldom need a part passes it by at the cost of a comparison, not of writes to spare elements.
    """
    names: list[str] = []
    places: list[int] = []

    def find() -> None:
        after, left = body(work, values)
        for field in dataclasses.fields(work):  # type: ignore[arg-type]
            if getattr(after, field.name) is not getattr(work, field.name):
                names.append(field.name)
        places.extend(at for at, (old, new) in enumerate(zip(values, left, strict=True)) if old is not new)

    jax.eval_shape(find)

    def once(inner: W, local: Local) -> tuple[W, Local]:
        given = list(values)
        for at, value in zip(places, local[1:], strict=True):
            given[at] = value
        inner, left = body(inner, _like(values, given))
        return inner, (False, *(left[at] for at in places))

    start = (predicate, *(values[at] for at in places))
    unchanged = [name for name in reads if name not in names]
    work, local = loop(lambda c: c[0], once, work, start, unchanged, names)
    found = list(values)
    for at, value in zip(places, local[1:], strict=True):
        found[at] = value
    return work, _like(values, found)


def _like(values: V, given: Sequence[Any]) -> V:
    made = getattr(type(values), "_make", tuple)
    return made(given)  # type: ignore[no-any-return]


def fori_loop(
    start: Scalar,
    stop: Scalar,
    body: Callable[[Scalar, W], W],
    work: W,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> W:
    """`body(i, work)` for `i` from `start` to `stop`, as `jax.lax.fori_loop` orders its arguments: a `loop`."""

    def step(inner: W, local: Local) -> tuple[W, Local]:
        return body(local[0], inner), (local[0] + 1,)

    return loop(lambda local: local[0] < stop, step, work, (start,), reads, writes)[0]


def when(
    predicate: Scalar,
    body: Callable[[W], W],
    work: W,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> W:
    """Runs `body` if `predicate` holds: a loop of at most one trip, since branches would copy what they pass on."""

    def once(inner: W, _: Local) -> tuple[W, Local]:
        return body(inner), (False,)

    # `lax.cond` copies every array that its branches return changed; a loop of at most one trip updates them in
    # place.
    return loop(lambda local: local[0], once, work, (predicate,), reads, writes)[0]


def peek(
    predicate: Scalar,
    body: Callable[[W], Sequence[Scalar]],
    work: W,
    reads: Sequence[str],
    default: Sequence[int],
) -> tuple[W, tuple[Scalar, ...]]:
    """Reads scalars in a loop of at most one trip, so that they may be used after the arrays change.

    They are what `body` returned, or `default` where the predicate does not hold.
    """

    def once(inner: W, local: Local) -> tuple[W, Local]:
        return inner, (jnp.zeros_like(local[0]), *body(inner))

    work, local = loop(lambda local: local[0], once, work, (predicate, *default), reads)
    return work, tuple(local[1:])


def scalars(values: Sequence[Any]) -> tuple[Scalar, ...]:
    """Int32 and bool scalars of what a body returned."""
    return tuple(
        jnp.asarray(value, jnp.bool_ if jnp.result_type(value) == jnp.bool_ else jnp.int32) for value in values
    )


def divide(a: Scalar, b: Scalar) -> Scalar:
    """`a // b` of a non-negative `a` and a positive `b`, broadcast; `//` itself costs corrections for signs."""
    return lax.div(*_int32(a, b))


def remainder(a: Scalar, b: Scalar) -> Scalar:
    """`a % b` of a non-negative `a` and a positive `b`, broadcast."""
    return lax.rem(*_int32(a, b))


def ceil_divide(a: Scalar, b: Scalar) -> Scalar:
    """`a / b`, rounded up, of a non-negative `a` and a positive `b`."""
    a, b = _int32(a, b)
    return lax.div(a + b - 1, b)


def _int32(*values: Any) -> tuple[Scalar, ...]:
    return tuple(jnp.broadcast_arrays(*(jnp.asarray(value, jnp.int32) for value in values)))

"""Rows of block ids under two indices at once: the manager's blocks, and the kernels' smaller ones.

Slot p of a row is column p of `blocks`, with a block v, and the columns `p * ratio + j` of `kernel_blocks`, with the
kernel blocks `v * ratio + j`, j below `ratio` (RTP-LLM `BlockIds`). Every change goes through one scatter that writes
both, so that the two cannot fall out of step. Each operation is jitted and donates its first argument; a refused one
changes nothing and says why in a `Status`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import OperationError
from hkv.pytrees import pytree
from hkv.state.status import Status
from hkv.typed_jit import Ids, typed_jit

INT32_MAX = 2**31 - 1


@pytree()
@dataclasses.dataclass(frozen=True)
class BlockRows:
    """Block tables of one group. A pytree; `vmap` over a stack of them for several groups.

    Attributes:
      blocks: int32[rows, width], block ids; 0 from a row's length on.
      kernel_blocks: int32[rows, width * span], kernel block ids, `ratio` a slot, packed from the left; 0 after them.
        `span` is the largest ratio the arrays have room for.
      lengths: int32[rows], slots in use, null ones included.
      ratio: int32[], kernel blocks per block, 1 to `span`.
      null: int32[], the id that stands for no block: 0 (vLLM's null block, whose kernel blocks are 0 to `ratio` - 1) or
        -1 (RTP-LLM's hole, whose kernel blocks are -1).
    """

    blocks: jax.Array
    kernel_blocks: jax.Array
    lengths: jax.Array
    ratio: jax.Array
    null: jax.Array


def init_rows(num_rows: int, width: int, *, ratio: int = 1, null: int = 0, span: int | None = None) -> BlockRows:
    """Empty rows.

    Args:
      num_rows: rows, one a request.
      width: slots per row, in blocks.
      ratio: kernel blocks per block.
      null: the id that stands for no block, 0 or -1.
      span: room for ratios up to this one, so that groups of several ratios share one executable; None for `ratio`.

    Raises:
      OperationError: a size below 1, a ratio above `span`, another null, a kernel row of 2^31 columns or more.
    """
    span = ratio if span is None else span
    for name, value in (("num_rows", num_rows), ("width", width), ("ratio", ratio), ("span", span)):
        if type(value) is not int or value < 1:
            raise OperationError(name, value, "a positive integer")
    if ratio > span:
        raise OperationError("ratio", ratio, f"at most the span of {span}")
    if null not in (0, -1):
        raise OperationError("null", null, "0 or -1")
    if width * span > INT32_MAX:
        raise OperationError(
            "width", width, f"at most {INT32_MAX // span} slots, so that an int32 counts kernel blocks"
        )
    return BlockRows(
        blocks=jnp.zeros((num_rows, width), jnp.int32),
        kernel_blocks=jnp.zeros((num_rows, width * span), jnp.int32),
        lengths=jnp.zeros(num_rows, jnp.int32),
        ratio=jnp.array(np.int32(ratio)),
        null=jnp.array(np.int32(null)),
    )


@typed_jit(donate_argnames="rows")
def append(rows: BlockRows, row: Ids, ids: Ids, count: Ids) -> tuple[BlockRows, jax.Array]:
    """Append `ids[:count]` to a row. Scalars int32[], `ids` int32[K]; the status is int32[], a `Status`."""
    length = _length(rows, row)
    live = jnp.arange(ids.shape[0]) < count
    status = _first(
        (~_is_row(rows, row), Status.NO_SUCH_ROW),
        (~_is_count(count, ids), Status.BAD_COUNT),
        (length > rows.blocks.shape[1] - count, Status.BAD_LENGTH),
        (jnp.any(live & ~_is_value(rows, ids)), Status.BAD_BLOCK),
    )
    live &= status == Status.OK
    rows = _write(rows, row, length + jnp.arange(ids.shape[0]), ids, live)
    return _set_length(rows, row, length + count, status), status


@typed_jit(donate_argnames="rows")
def append_all(rows: BlockRows, ids: Ids, counts: Ids) -> tuple[BlockRows, jax.Array]:
    """Append `ids[r, :counts[r]]` to every row r: what a step's scheduler hands to the worker (vLLM `BlockTable`).

    `ids` is int32[rows, K], `counts` int32[rows]. Returns a status int32[rows]: a refused row keeps what it had, the
    others are served.
    """
    live = jnp.arange(ids.shape[1]) < counts[:, None]
    status = _first(
        ((counts < 0) | (counts > ids.shape[1]), Status.BAD_COUNT),
        (rows.lengths > rows.blocks.shape[1] - counts, Status.BAD_LENGTH),
        (jnp.any(live & ~_is_value(rows, ids), axis=1), Status.BAD_BLOCK),
    )
    served = status == Status.OK
    positions = rows.lengths[:, None] + jnp.arange(ids.shape[1])
    row = jnp.broadcast_to(jnp.arange(ids.shape[0])[:, None], ids.shape)
    flat = (row.ravel(), positions.ravel(), ids.ravel(), (live & served[:, None]).ravel())
    rows = _write(rows, *flat)
    return dataclasses.replace(rows, lengths=rows.lengths + jnp.where(served, counts, 0)), status


@typed_jit(donate_argnames="rows")
def assign(rows: BlockRows, row: Ids, ids: Ids, count: Ids) -> tuple[BlockRows, jax.Array]:
    """Make `ids[:count]` a row's whole content. Scalars int32[], `ids` int32[K]; the status is int32[]."""
    live = jnp.arange(ids.shape[0]) < count
    status = _first(
        (~_is_row(rows, row), Status.NO_SUCH_ROW),
        (~_is_count(count, ids), Status.BAD_COUNT),
        (count > rows.blocks.shape[1], Status.BAD_LENGTH),
        (jnp.any(live & ~_is_value(rows, ids)), Status.BAD_BLOCK),
    )
    ok = status == Status.OK
    rows = _write(rows, row, jnp.arange(ids.shape[0]), ids, live & ok)
    rows = _blank(rows, row, count, _length(rows, row), ok)
    return _set_length(rows, row, count, status), status


@typed_jit(donate_argnames="rows")
def remove(rows: BlockRows, row: Ids, positions: Ids, count: Ids) -> tuple[BlockRows, jax.Array]:
    """Set the slots `positions[:count]` of a row to null; the row keeps its length (RTP-LLM `BlockIds::remove`)."""
    live = jnp.arange(positions.shape[0]) < count
    status = _first(
        (~_is_row(rows, row), Status.NO_SUCH_ROW),
        (~_is_count(count, positions), Status.BAD_COUNT),
        (jnp.any(live & ~_is_slot(rows, row, positions)), Status.NO_SUCH_POSITION),
    )
    nulls = jnp.broadcast_to(rows.null, positions.shape)
    return _write(rows, row, positions, nulls, live & (status == Status.OK)), status


@typed_jit(donate_argnames="rows")
def swap(rows: BlockRows, row: Ids, first: Ids, second: Ids) -> tuple[BlockRows, jax.Array]:
    """Exchange two slots of a row. All int32[]; equal positions change nothing."""
    positions = jnp.stack([first, second])
    status = _first(
        (~_is_row(rows, row), Status.NO_SUCH_ROW),
        (~jnp.all(_is_slot(rows, row, positions)), Status.NO_SUCH_POSITION),
    )
    values = _take(rows, row, positions[::-1])
    return _write(rows, row, positions, values, jnp.broadcast_to(status == Status.OK, (2,))), status


@typed_jit(donate_argnames="rows")
def set_at(rows: BlockRows, row: Ids, position: Ids, block: Ids) -> tuple[BlockRows, jax.Array]:
    """Put a block, or null, into a slot of a row. All int32[]."""
    status = _first(
        (~_is_row(rows, row), Status.NO_SUCH_ROW),
        (~_is_slot(rows, row, position), Status.NO_SUCH_POSITION),
        (~_is_value(rows, block), Status.BAD_BLOCK),
    )
    return _write(rows, row, position[None], block[None], (status == Status.OK)[None]), status


@typed_jit(donate_argnames="rows")
def resize(rows: BlockRows, row: Ids, length: Ids, value: Ids) -> tuple[BlockRows, jax.Array]:
    """Cut a row to `length` slots, or grow it with `value`. All int32[]."""
    width = rows.blocks.shape[1]
    old = _length(rows, row)
    status = _first(
        (~_is_row(rows, row), Status.NO_SUCH_ROW),
        ((length < 0) | (length > width), Status.BAD_LENGTH),
        ((length > old) & ~_is_value(rows, value), Status.BAD_BLOCK),
    )
    ok = status == Status.OK
    columns = jnp.arange(width)
    grown = (columns >= old) & (columns < length) & ok
    rows = _write(rows, row, columns, jnp.broadcast_to(value, (width,)), grown)
    rows = _blank(rows, row, length, old, ok)
    return _set_length(rows, row, length, status), status


@typed_jit(donate_argnames="rows")
def pop(rows: BlockRows, row: Ids) -> tuple[BlockRows, jax.Array, jax.Array]:
    """Take the last slot off a row: its block, null when refused, and the status, BAD_LENGTH for an empty row."""
    last = _length(rows, row) - 1
    status = _first((~_is_row(rows, row), Status.NO_SUCH_ROW), (last < 0, Status.BAD_LENGTH))
    ok = status == Status.OK
    block = jnp.where(ok, _take(rows, row, last), rows.null)
    rows = _write(rows, row, last[None], block[None], ok[None], blank=True)
    return _set_length(rows, row, last, status), block, status


@typed_jit(donate_argnames="rows")
def move(rows: BlockRows, source: Ids, target: Ids) -> tuple[BlockRows, jax.Array]:
    """Make row `target` what row `source` is and leave `source` empty (vLLM `BlockTable.move_row`). All int32[]."""
    status = _first((~(_is_row(rows, source) & _is_row(rows, target)), Status.NO_SUCH_ROW))
    ok = (status == Status.OK) & (source != target)
    outside = rows.lengths.shape[0]
    to, cleared = jnp.where(ok, target, outside), jnp.where(ok, source, outside)
    taken = jnp.where(ok, source, 0)

    def moved(array: jax.Array) -> jax.Array:
        return array.at[to].set(array[taken], mode="drop").at[cleared].set(0, mode="drop")

    blocks, kernel_blocks, lengths = moved(rows.blocks), moved(rows.kernel_blocks), moved(rows.lengths)
    return dataclasses.replace(rows, blocks=blocks, kernel_blocks=kernel_blocks, lengths=lengths), status


def _write(rows: BlockRows, row, positions, values, live, *, blank: bool = False) -> BlockRows:
    """Scatter `values` into slots of both tables where `live`; every change of content passes here.

    `row` is a scalar or one per position; `blank` writes the zeros that stand after a row's end.
    """
    width = rows.blocks.shape[1]
    j = jnp.arange(rows.kernel_blocks.shape[1] // width)
    row = jnp.where(live, jnp.broadcast_to(row, positions.shape), 0)
    columns = jnp.where(live, positions, width)
    inside = live[:, None] & (j < rows.ratio)
    kernel_columns = jnp.where(inside, columns[:, None] * rows.ratio + j, rows.kernel_blocks.shape[1])
    value = values[:, None]
    # A hole (-1, RTP-LLM) has holes as kernel blocks; vLLM's null block 0 is a block, with kernel blocks of its own.
    kernel_values = jnp.where(value < 0, value, value * rows.ratio + j)
    if blank:
        values, kernel_values = jnp.zeros_like(values), jnp.zeros_like(kernel_values)
    return dataclasses.replace(
        rows,
        blocks=rows.blocks.at[row, columns].set(values, mode="drop"),
        kernel_blocks=rows.kernel_blocks.at[row[:, None], kernel_columns].set(kernel_values, mode="drop"),
    )


def _blank(rows: BlockRows, row, start, stop, ok) -> BlockRows:
    """Zero a row's slots from `start` up to `stop`."""
    columns = jnp.arange(rows.blocks.shape[1])
    live = (columns >= start) & (columns < stop) & ok
    return _write(rows, row, columns, jnp.zeros_like(columns), live, blank=True)


def _first(*conditions) -> jax.Array:
    """The status of the first condition that holds, OK if none does."""
    status = jnp.int32(Status.OK)
    for refused, code in reversed(conditions):
        # Backwards, so that the first condition is written last and wins: the order of checks is the order of errors.
        status = jnp.where(refused, jnp.int32(code), status)
    return status


def _is_row(rows: BlockRows, row) -> jax.Array:
    return (row >= 0) & (row < rows.lengths.shape[0])


def _is_count(count, values) -> jax.Array:
    return (count >= 0) & (count <= values.shape[0])


def _is_value(rows: BlockRows, ids) -> jax.Array:
    # The largest block whose last kernel block an int32 can name.
    last = (INT32_MAX - (rows.ratio - 1)) // rows.ratio
    return (ids == rows.null) | ((ids >= 0) & (ids <= last))


def _is_slot(rows: BlockRows, row, positions) -> jax.Array:
    return (positions >= 0) & (positions < _length(rows, row))


def _length(rows: BlockRows, row) -> jax.Array:
    """Slots of a row; 0 for a row that is not there."""
    known = _is_row(rows, row)
    return jnp.where(known, rows.lengths[jnp.where(known, row, 0)], 0)


def _take(rows: BlockRows, row, positions) -> jax.Array:
    """Contents of slots; arbitrary where the slot does not exist, for the caller to mask."""
    inside = _is_slot(rows, row, positions)
    return rows.blocks[jnp.where(_is_row(rows, row), row, 0), jnp.where(inside, positions, 0)]


def _set_length(rows: BlockRows, row, length, status) -> BlockRows:
    at = jnp.where(status == Status.OK, row, rows.lengths.shape[0])
    return dataclasses.replace(rows, lengths=rows.lengths.at[at].set(length, mode="drop"))

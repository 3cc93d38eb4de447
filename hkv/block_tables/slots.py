"""Addresses from block tables: tables for kernels, slots of tokens, tokens of each rank.

A slot is the pair (block, offset in tokens), never one number, so that no cache outgrows int32. Ids and positions that
do not exist are dropped, counted and reported in `Dropped`, never wrapped or clamped. Rules: vLLM 0.33 `BlockTables`,
`get_dcp_local_seq_lens`; RTP-LLM `CPSlotMapper`, which is the same formula with an interleave
of one block. `vmap` every function over stacked arguments for several groups.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import OperationError
from hkv.pytrees import pytree
from hkv.typed_jit import Ids, typed_jit

if TYPE_CHECKING:
    from hkv.spec import LayerSpec

INT32_MAX = 2**31 - 1

PAD = -1
"""Block and offset of a token that is written nowhere."""


@pytree()
@dataclasses.dataclass(frozen=True)
class SlotGeometry:
    """Mapping from one group's token positions to slots on one rank. All int32[] but `mapped`; no static field.

    Attributes:
      block_size: tokens per block on one rank; a row's column stands for `block_size * ranks` tokens.
      ranks: ranks over which the group's tokens are split; 1 for a replicated group.
      rank: this rank.
      interleave: consecutive tokens that stay together on a rank.
      mapped: bool[]; False for groups whose layers write without a slot mapping: all their slots are `PAD`.
    """

    block_size: jax.Array
    ranks: jax.Array
    rank: jax.Array
    interleave: jax.Array
    mapped: jax.Array


@pytree()
@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots in which tokens are written; `PAD` in both arrays for tokens that are not written on this rank.

    Attributes:
      blocks: int32[...], block ids.
      offsets: int32[...], offset in the block, in tokens.
    """

    blocks: jax.Array
    offsets: jax.Array


@pytree()
@dataclasses.dataclass(frozen=True)
class Dropped:
    """Numbers of inputs that were left out because they do not exist; all zero when all is well.

    Attributes:
      rows: int32[], references to rows that are not there.
      positions: int32[], token positions outside their row, or that an int32 cannot hold.
      blocks: int32[], block ids outside the pool, holes where a token should go, or ids that an int32 cannot hold.
    """

    rows: jax.Array
    positions: jax.Array
    blocks: jax.Array


def require_none(dropped: Dropped) -> None:
    """Raise OperationError if anything was dropped; waits for the device."""
    for field in dataclasses.fields(dropped):
        count = int(np.sum(getattr(dropped, field.name)))
        if count:
            raise OperationError(field.name, count, "none out of range")


def slot_geometry(
    block_size: int, *, ranks: int = 1, rank: int = 0, interleave: int = 1, mapped: bool = True
) -> SlotGeometry:
    """A group's geometry from plain numbers.

    Args:
      block_size: tokens per block on one rank, not yet multiplied by `ranks`.
      ranks: ranks that split the group's tokens; 1 for a replicated group, whatever the others do.
      rank: this rank, 0 up to `ranks`.
      interleave: tokens that stay together, a divisor of `block_size`; `block_size` for RTP-LLM's round robin.
      mapped: whether the group's layers use a slot mapping.

    Raises:
      OperationError: a size below 1, a rank that is not there, an interleave that does not divide the block (vLLM asks
        the same at start-up), blocks of 2^31 tokens and more over all ranks.
    """
    for name, value in (("block_size", block_size), ("ranks", ranks), ("interleave", interleave)):
        if type(value) is not int or value < 1:
            raise OperationError(name, value, "a positive integer")
    if type(rank) is not int or not 0 <= rank < ranks:
        raise OperationError("rank", rank, f"an integer from 0 up to {ranks}")
    if block_size % interleave:
        raise OperationError("interleave", interleave, f"a divisor of the block's {block_size} tokens")
    if block_size * ranks > INT32_MAX:
        raise OperationError("block_size", block_size, f"at most {INT32_MAX // ranks} tokens over {ranks} ranks")
    number: Any = np.int32
    flag: Any = np.bool_
    return SlotGeometry(
        block_size=number(block_size),
        ranks=number(ranks),
        rank=number(rank),
        interleave=number(interleave),
        mapped=flag(mapped),
    )


def geometry_of_spec(spec: LayerSpec, *, ranks: int = 1, rank: int = 0, interleave: int = 1) -> SlotGeometry:
    """The geometry of a group of such layers among `ranks` ranks, of which only sharded groups take notice."""
    if not getattr(spec, "cp_sharded", False):
        ranks, rank, interleave = 1, 0, 1
    return slot_geometry(spec.block_size, ranks=ranks, rank=rank, interleave=interleave, mapped=not spec.one_block)


def retained_tokens(spec: LayerSpec, context_parallel: int = 1) -> int:
    """Tokens below a step's first one that a forward pass may read, for `forward_tables`; -1 for all of them.

    Args:
      spec: cache description of the group's layers.
      context_parallel: ranks of the engine; above 1, no group's rows are touched (vLLM 0.33), sharded or not.
    """
    return getattr(spec, "retained_tokens", -1) if context_parallel == 1 else -1


@typed_jit(static_argnames="span")
def kernel_table(table: Ids, ratio: Ids, stride: Ids, num_blocks: Ids, *, span: int) -> tuple[jax.Array, Dropped]:
    """The table of kernel blocks that a kernel reads: entry b becomes `b * stride + j`, j below `ratio`.

    Args:
      table: int32[R, W], block ids; -1 is a hole and stays one.
      ratio: int32[], kernel blocks per block, 1 to `span`.
      stride: int32[], kernel blocks from one block to the next: `ratio` in a dense cache, more in a packed one, where
        other layers' pages lie in between and are never named.
      num_blocks: int32[], blocks in the pool.
      span: largest ratio that the result has room for; static.

    Returns:
      int32[R, W * span], packed from the left, 0 behind the last entry and for dropped ones; what was dropped.
    """
    width = table.shape[1]
    last = jnp.minimum(num_blocks - 1, (INT32_MAX - (ratio - 1)) // stride)
    hole = table == PAD
    good = (table >= 0) & (table <= last)
    columns = jnp.arange(width * span)
    source = jnp.minimum(columns // ratio, width - 1)
    inside = columns < width * ratio
    entries = jnp.where(good, table, 0)[:, source] * stride + columns % ratio
    expanded = jnp.where(good[:, source], entries, jnp.where(hole[:, source], PAD, 0))
    return jnp.where(inside, expanded, 0), _dropped(blocks=~(hole | good))


@typed_jit()
def forward_tables(
    geometry: SlotGeometry, table: Ids, rows: Ids, starts: Ids, retained: Ids
) -> tuple[jax.Array, Dropped]:
    """The rows that one forward pass reads, in batch order, with the null block where a window has passed.

    Rows on the worker only grow: blocks that the scheduler freed behind a window are still named there. Entries wholly
    below what the first scheduled token reads are therefore replaced by 0, unless tokens are split over ranks (vLLM).

    Args:
      geometry: of the group.
      table: int32[R, W], all requests' rows.
      rows: int32[Q], the row of each request in the batch, -1 for padding.
      starts: int32[Q], position of each request's first scheduled token, 0 or more.
      retained: int32[], tokens kept below that position, -1 to keep all: see `retained_tokens`.

    Returns:
      int32[Q, W], zero for padding and for dropped requests; what was dropped.
    """
    padding = rows == PAD
    known = (rows >= 0) & (rows < table.shape[0])
    started = starts >= 0
    good = known & started
    behind = jnp.maximum(jnp.where(good, starts, 0) - jnp.maximum(retained, 0), 0) // geometry.block_size
    behind = jnp.where((retained < 0) | (geometry.ranks > 1), 0, behind)
    kept = good[:, None] & (jnp.arange(table.shape[1]) >= behind[:, None])
    gathered = jnp.where(kept, table[jnp.where(known, rows, 0)], 0)
    return gathered, _dropped(rows=~(padding | known), positions=known & ~started)


@typed_jit(static_argnames="size")
def batch_tokens(rows: Ids, starts: Ids, counts: Ids, *, size: int) -> tuple[jax.Array, jax.Array, Dropped]:
    """Rows and positions of a step's tokens, request after request, `PAD` up to the buffer's end.

    Args:
      rows: int32[Q], each request's row, -1 for a dummy one; Q * `size` stays below 2^31.
      starts: int32[Q], position of its first token.
      counts: int32[Q], its tokens.
      size: tokens in the buffer; static.

    Returns:
      int32[size] rows, int32[size] positions, and what was dropped: whole requests with a count below 0 or that do not
      fit into the rest of the buffer (`rows`), or whose positions are below 0 or beyond int32 (`positions`).
    """
    counted = (counts >= 0) & (counts <= size)
    placed = (starts >= 0) & (starts <= INT32_MAX - jnp.maximum(counts - 1, 0))
    wanted = jnp.where(counted & placed, counts, 0)
    fits = jnp.cumsum(wanted) <= size
    taken = jnp.where(fits, wanted, 0)
    ends = jnp.cumsum(taken)
    token = jnp.arange(size)
    request = jnp.searchsorted(ends, token, side="right")
    real = request < rows.shape[0]
    request = jnp.where(real, request, 0)
    positions = starts[request] + (token - (ends - taken)[request])
    dropped = _dropped(rows=~counted | (placed & ~fits & (wanted > 0)), positions=counted & ~placed)
    return jnp.where(real, rows[request], PAD), jnp.where(real, positions, PAD), dropped


@typed_jit()
def slot_mapping(
    geometry: SlotGeometry,
    table: Ids,
    lengths: Ids,
    num_blocks: Ids,
    rows: Ids,
    positions: Ids,
) -> tuple[Slots, Dropped]:
    """The slot of each token on this rank (vLLM 0.33 `ComputeSlotMappingKernel`).

    Args:
      geometry: of the group.
      table: int32[R, W], block ids.
      lengths: int32[R], entries of each row that are in use.
      num_blocks: int32[], blocks in the pool.
      rows: int32[T], each token's row, -1 for padding and dummy requests.
      positions: int32[T], each token's position in its request.

    Returns:
      Slots [T]: `PAD` for padding, for tokens of other ranks, for groups without a mapping, and for dropped tokens:
      those beyond their row, or whose block is a hole or not in the pool. The null block 0 is a block like any other.
    """
    real = geometry.mapped & (rows != PAD)
    known = real & (rows >= 0) & (rows < table.shape[0])
    row = jnp.where(known, rows, 0)
    span = geometry.block_size * geometry.ranks
    column, inner = positions // span, positions % span
    inside = known & (positions >= 0) & (column < jnp.minimum(lengths[row], table.shape[1]))
    local = inside & ((inner // geometry.interleave) % geometry.ranks == geometry.rank)
    block = table[row, jnp.where(inside, column, 0)]
    good = local & (block >= 0) & (block < num_blocks)
    offset = inner // (geometry.ranks * geometry.interleave) * geometry.interleave + inner % geometry.interleave
    slots = Slots(jnp.where(good, block, PAD), jnp.where(good, offset, PAD))
    return slots, _dropped(rows=real & ~known, positions=known & ~inside, blocks=local & ~good)


@typed_jit()
def positions_of(geometry: SlotGeometry, columns: Ids, offsets: Ids) -> tuple[jax.Array, Dropped]:
    """The position that falls on an offset of a row's column on this rank: the inverse of the slot mapping.

    Args:
      geometry: of the group.
      columns: int32[T], columns of the row, -1 for padding.
      offsets: int32[T], tokens from the block's first.

    Returns:
      int32[T] positions, `PAD` for padding and for what was dropped: offsets outside the block, columns below -1,
      positions beyond int32.
    """
    real = columns != PAD
    group = geometry.interleave * geometry.ranks
    whole = (offsets >= 0) & (offsets < geometry.block_size) & (columns >= 0)
    offset = jnp.where(whole, offsets, 0)
    inner = offset // geometry.interleave * group + geometry.rank * geometry.interleave + offset % geometry.interleave
    span = geometry.block_size * geometry.ranks
    good = real & whole & (columns <= (INT32_MAX - inner) // span)
    position = jnp.where(good, columns, 0) * span + inner
    return jnp.where(good, position, PAD), _dropped(positions=real & ~good)


@typed_jit()
def kernel_slots(slots: Slots, kernel_block_size: Ids, stride: Ids) -> tuple[Slots, Dropped]:
    """The same slots in kernel blocks: block `b * stride + offset // kernel_block_size`, offset the remainder.

    Args:
      slots: in the manager's blocks.
      kernel_block_size: int32[], tokens per kernel block.
      stride: int32[], kernel blocks from one block to the next, as in `kernel_table`.
    """
    real = slots.blocks != PAD
    inner = slots.offsets // kernel_block_size
    good = real & (slots.blocks >= 0) & (slots.offsets >= 0) & (slots.blocks <= (INT32_MAX - inner) // stride)
    block = jnp.where(good, slots.blocks, 0) * stride + inner
    offset = slots.offsets % kernel_block_size
    return Slots(jnp.where(good, block, PAD), jnp.where(good, offset, PAD)), _dropped(blocks=real & ~good)


@typed_jit()
def linear_slots(slots: Slots, block_size: Ids) -> tuple[jax.Array, Dropped]:
    """Slots as single numbers, `block * block_size + offset`, for kernels that want them so.

    Returns:
      int32[...], `PAD` for padding and for those beyond int32, which are counted as dropped blocks; a cache with more
      slots than that has to be addressed in pairs.
    """
    real = slots.blocks != PAD
    whole = (slots.blocks >= 0) & (slots.offsets >= 0)
    good = real & whole & (slots.blocks <= (INT32_MAX - slots.offsets) // block_size)
    number = jnp.where(good, slots.blocks, 0) * block_size + slots.offsets
    return jnp.where(good, number, PAD), _dropped(blocks=real & ~good)


@typed_jit()
def held_tokens(geometry: SlotGeometry, lengths: Ids) -> jax.Array:
    """Tokens of sequences of `lengths` tokens (int32[...], 0 or more) that this rank holds, int32[...]."""
    group = geometry.interleave * geometry.ranks
    rest = lengths % group - geometry.rank * geometry.interleave
    return lengths // group * geometry.interleave + jnp.clip(rest, 0, geometry.interleave)


@typed_jit()
def row_columns(geometry: SlotGeometry, lengths: Ids) -> jax.Array:
    """Columns that sequences of `lengths` tokens (int32[...], 0 or more) fill: the same number on every rank."""
    span = geometry.block_size * geometry.ranks
    return lengths // span + (lengths % span > 0)


def _dropped(rows: Any = False, positions: Any = False, blocks: Any = False) -> Dropped:
    return Dropped(*(jnp.sum(jnp.asarray(mask), dtype=jnp.int32) for mask in (rows, positions, blocks)))

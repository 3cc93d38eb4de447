"""Carrying out a plan with JAX: each rank packs what it sends, JAX moves the packets, each rank unpacks. Jitted.

A packet holds all that one rank sends another, and crosses by `jax.device_put`; nothing else does. It is made of units,
a few states of a few heads of one layer, the same number of bytes in every packet of an exchange, in the same order on
both sides. Five coordinates name one: layer, block, kernel block in it, group of states, group of heads. One process
has to see both meshes, which may share devices. The target's pool is donated and changed in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hkv.errors import ConfigError, LayoutError
from hkv.layout.orders import H, N
from hkv.layout.strided import StridedView
from hkv.layout.views.runs import ROW_LIMIT, Runs, runs_of
from hkv.mesh.parallel_shape import Rank, part_by_head
from hkv.mesh.resharding import Move, Plan, Side
from hkv.mesh.sharding import AXES, ShardedLayout
from hkv.paged.implementations import choose


@dataclasses.dataclass(frozen=True)
class _End:
    """One side of an exchange: what the plan says of it, where it is, and the replica concerned."""

    side: Side
    sharded: ShardedLayout
    data: int

    def table(self, units: np.ndarray) -> np.ndarray:
        """Units `[tensor, context, ...]` of the replica, -1 for the others: `[data, tensor, context, ...]`."""
        table = np.full((self.sharded.shape.data, *units.shape), -1, np.int32)
        table[self.data] = units
        return table


def execute(
    plan: Plan,
    source_pool: jax.Array,
    source: ShardedLayout,
    target_pool: jax.Array,
    target: ShardedLayout,
    *,
    source_data: int = 0,
    target_data: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Brings what a plan names to the target.

    Packets are padded to the longest of their direction, rounded up by at most an eighth so that plans share
    executables.

    Args:
      plan: of one group of layers.
      source_pool: unsigned words `[data, tensor, context, words]` on the source's mesh.
      source: layout of the source's bytes.
      target_pool: the target's pool on its mesh, of the same dtype; donated.
      target: layout of the target's bytes.
      source_data: replica that has the request.
      target_data: replica that gets it.
      implementation: as in `hkv.paged.write`.

    Returns:
      The target's pool.

    Raises:
      ConfigError: a mesh of another shape than the plan's; devices of another process; no such replica.
      LayoutError: another layout than the plan's, or pools of different words.
    """
    _check(plan.source, source, source_pool, "source", source_data)
    _check(plan.target, target, target_pool, "target", target_data)
    if source_pool.dtype != target_pool.dtype:
        raise LayoutError("target_pool", target_pool.dtype, f"words of {source_pool.dtype}, as on the source")
    giver, taker = _End(plan.source, source, source_data), _End(plan.target, target, target_data)
    if plan.sends:
        target_pool = _exchange(plan.sends, plan.layers, source_pool, giver, target_pool, taker, implementation)
    if plan.forwards:
        target_pool = _exchange(plan.forwards, plan.layers, target_pool, taker, target_pool, taker, implementation)
    return target_pool


def _exchange(
    moves: Sequence[Move],
    layers: range,
    source_pool: jax.Array,
    source: _End,
    target_pool: jax.Array,
    target: _End,
    implementation: str | None,
) -> jax.Array:
    """One hop: everything is packed before anything is unpacked."""
    packets = make_packets(moves, layers, source.side, target.side)
    read, written = source.table(packets.read), target.table(packets.written)
    packed = _pack(source_pool, source.sharded, read, packets.move_unit, implementation)
    arrived = _carry(packed, packets, source, target)
    return _unpack(target_pool, target.sharded, written, arrived, packets.move_unit, implementation)


def _carry(packed: list[list[jax.Array]], packets: Packets, source: _End, target: _End) -> list[list[jax.Array]]:
    """Packets from the devices that packed them to those that unpack them.

    Both are given per slot and view, `[data, tensor, context, length, words]`. Packets that are not sent are zeros,
    made where they are.
    """
    devices = target.sharded.mesh.devices
    shards = [[_by_device(array) for array in slot] for slot in packed]
    leaving: list[jax.Array] = []
    places: list[object] = []
    keys: list[tuple[int, int, object]] = []
    for route, out in packets.out_slots.items():
        origin, goal = source.sharded.mesh.devices[source.data][route.sender], devices[target.data][route.receiver]
        for view, shard in enumerate(shards[out]):
            leaving.append(shard[origin])
            places.append(goal)
            keys.append((packets.in_slots[route], view, goal))
    landed = dict(zip(keys, jax.device_put(leaving, places), strict=True))
    arrived: list[list[jax.Array]] = []
    sharding = target.sharded.sharding
    for slot in range(1 + max(packets.in_slots.values())):
        arrived.append([])
        for view, array in enumerate(packed[0]):
            shape = (*devices.shape, *array.shape[3:])
            empty = _by_device(_zeros(shape, array.dtype, sharding))
            pieces = [landed.get((slot, view, device), empty[device]) for device in devices.flat]
            arrived[-1].append(jax.make_array_from_single_device_arrays(shape, sharding, pieces))
    return arrived


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


def _by_device(array: jax.Array) -> dict[object, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


@functools.partial(jax.jit, static_argnames=("sharded", "move_unit", "implementation"))
def _pack(
    pool: jax.Array, sharded: ShardedLayout, table: jax.Array, move_unit: MoveUnit, implementation: str | None
) -> list[list[jax.Array]]:
    """Packets of every rank: per slot and view `[data, tensor, context, length, words]`."""

    def local(pool, table):
        flat, packets = pool.reshape(-1), []
        for units in table[0, 0, 0]:
            packets.append([])
            for runs in _runs(flat, sharded, move_unit):
                starts, _ = runs.start_rows(*units.T)
                words = choose(implementation).gather(flat.reshape(-1, runs.row), starts, runs.rows_per_run)
                packets[-1].append(words.reshape(1, 1, 1, units.shape[0], runs.words))
        return packets

    return jax.shard_map(local, mesh=sharded.mesh, in_specs=(P(*AXES), P(*AXES)), out_specs=P(*AXES), check_vma=False)(
        pool, table
    )


@functools.partial(jax.jit, static_argnames=("sharded", "move_unit", "implementation"), donate_argnames="pool")
def _unpack(
    pool: jax.Array,
    sharded: ShardedLayout,
    table: jax.Array,
    packets: list[list[jax.Array]],
    move_unit: MoveUnit,
    implementation: str | None,
) -> jax.Array:
    """The pool with every rank's packets in place."""

    def local(pool, table, packets):
        flat = pool.reshape(-1)
        for units, slot in zip(table[0, 0, 0], packets, strict=True):
            for runs, words in zip(_runs(flat, sharded, move_unit), slot, strict=True):
                starts, _ = runs.start_rows(*units.T)
                shaped = words.reshape(units.shape[0], len(runs.starts), runs.rows_per_run, runs.row)
                flat = choose(implementation).scatter(flat.reshape(-1, runs.row), starts, shaped).reshape(-1)
        return flat.reshape(pool.shape)

    specs = (P(*AXES), P(*AXES), P(*AXES))
    mapped = jax.shard_map(local, mesh=sharded.mesh, in_specs=specs, out_specs=P(*AXES), check_vma=False)
    return mapped(pool, table, packets)


def _runs(pool: jax.Array, sharded: ShardedLayout, move_unit: MoveUnit) -> list[Runs]:
    """Runs of a unit in one rank's pool: whole cells where they hold nothing but parts, else part by part."""
    layout = sharded.layout
    views = [part_by_head(layout, part, sharded.shape.heads_per_rank) for part in layout.content]
    in_cells = all(part.strides is None and part.heads is None for part in layout.content)
    if in_cells and sum(part.nbytes for part in layout.content) == layout.shape[4]:
        cells = layout.cells()
        order = (0, 1, 2, 4, 3, 5)
        shape, strides = (tuple(values[axis] for axis in order) for values in (cells.shape, cells.strides))
        views = [StridedView(shape, strides, cells.offset, cells.dtype)]
    found = [runs_of(pool, _grouped(view, move_unit), COORDINATES) for view in views]
    if any(runs.page for runs in found):
        raise LayoutError("pool", f"{pool.dtype}{list(pool.shape)}", f"at most {ROW_LIMIT} rows of a unit's runs")
    return found


def _grouped(view: StridedView, move_unit: MoveUnit) -> StridedView:
    """`[layers, blocks, pieces, states, heads, ...]` with groups of states and of heads: the unit comes last."""
    (states, heads), (step, stride) = view.shape[3:5], view.strides[3:5]
    unit = [(move_unit.states, step), (move_unit.heads, stride)]
    extents, steps = zip(*(reversed(unit) if move_unit.heads_outside else unit), strict=True)
    shape = (*view.shape[:3], states // move_unit.states, heads // move_unit.heads, *extents, *view.shape[5:])
    strides = (*view.strides[:3], step * move_unit.states, stride * move_unit.heads, *steps, *view.strides[5:])
    return StridedView(shape, strides, view.offset, view.dtype)


def _check(side: Side, sharded: ShardedLayout, pool: jax.Array, name: str, data: int) -> None:
    planned = dataclasses.replace(side.shape, data=sharded.shape.data)
    if sharded.shape != planned:
        raise ConfigError(f"{name}.shape", sharded.shape, f"{planned}, as in the plan")
    if sharded.layout != side.layout:
        raise LayoutError(f"{name}.layout", sharded.layout.order.value, "the plan's layout")
    if not 0 <= data < sharded.shape.data:
        raise ConfigError(f"{name}_data", data, f"a replica from 0 to {sharded.shape.data - 1}")
    if not pool.is_fully_addressable:
        raise ConfigError(f"{name}_pool", "devices of several processes", "devices that this process sees")


# Packets: what each rank sends another, planned on the host.

COORDINATES = 5


class Route(NamedTuple):
    """Sender, receiver and heads of a packet."""

    sender: Rank
    receiver: Rank
    heads: range


@dataclasses.dataclass(frozen=True)
class MoveUnit:
    """The unit that every move is made of: static, so that few executables serve all plans.

    Consecutive states of a kernel block, and consecutive heads: heads are outside where the states of a head follow one
    another on both sides.
    """

    states: int
    heads: int
    heads_outside: bool


@dataclasses.dataclass(frozen=True)
class Packets:
    """One exchange: units that each sender packs and each receiver unpacks.

    Attributes:
      out_slots, in_slots: place of each packet among its sender's, and among its receiver's.
      read, written: int32 `[tensor, context, slots, units, COORDINATES]`, -1 where there is nothing.
    """

    move_unit: MoveUnit
    out_slots: Mapping[Route, int]
    in_slots: Mapping[Route, int]
    read: np.ndarray
    written: np.ndarray


def make_packets(moves: Sequence[Move], layers: range, source: Side, target: Side) -> Packets:
    """The packets of some moves, at least one: all sends, or all forwards, of a plan.

    Each is as long as the longest, rounded up by at most an eighth, so that plans share executables.
    """
    routes: dict[Route, list[Move]] = {}
    for move in moves:
        routes.setdefault(Route(move.source, move.target, move.heads), []).append(move)
    spans = {route: _spans(each) for route, each in routes.items()}
    move_unit = _move_unit(spans, source, target)
    senders, receivers = {route: route.sender for route in routes}, {route: route.receiver for route in routes}
    out_slots, in_slots = _slots(senders), _slots(receivers)
    read: dict[Route, np.ndarray] = {}
    written: dict[Route, np.ndarray] = {}
    for route, (blocks, places, starts, goals, counts) in spans.items():
        read[route] = _units(route.sender, route.heads, layers, blocks, starts, counts, source, move_unit)
        written[route] = _units(route.receiver, route.heads, layers, places, goals, counts, target, move_unit)
    length = _rounded(max(map(len, read.values())))
    return Packets(
        move_unit,
        out_slots,
        in_slots,
        _table(read, out_slots, senders, source, length),
        _table(written, in_slots, receivers, target, length),
    )


def _spans(moves: Sequence[Move]) -> np.ndarray:
    """Runs joined where they touch in both blocks, int `[5, spans]`: both blocks, first state in each, states."""
    spans: list[list[int]] = []
    for move in moves:
        first = len(spans)
        for run in move.runs:
            last = spans[-1] if len(spans) > first else None
            if last and (last[2] + last[4], last[3] + last[4]) == (run.source, run.target):
                last[4] += run.count
            else:
                spans.append([move.source_block, move.target_block, run.source, run.target, run.count])
    return np.array(spans).T


def _move_unit(spans: Mapping[Route, np.ndarray], source: Side, target: Side) -> MoveUnit:
    """The largest that every packet is a whole number of, on both sides."""
    states, heads = 0, 0
    for (sender, receiver, own), each in spans.items():
        states = math.gcd(states, int(np.gcd.reduce(each[2:], axis=None)))
        here, there = source.shape.heads_of(sender.tensor), target.shape.heads_of(receiver.tensor)
        heads = math.gcd(heads, len(own), own.start - here.start, own.start - there.start)
    for side in (source, target):
        states = math.gcd(states, side.layout.shape[N])
        heads = math.gcd(heads, side.shape.heads_per_rank)
    outside = all(side.layout.strides[H] > side.layout.strides[N] for side in (source, target))
    return MoveUnit(states, heads, outside)


def _slots(ranks: Mapping[Route, Rank]) -> dict[Route, int]:
    """Numbers the packets of each rank."""
    counts: dict[Rank, int] = {}
    found: dict[Route, int] = {}
    for route, rank in ranks.items():
        found[route] = counts.get(rank, 0)
        counts[rank] = found[route] + 1
    return found


def _units(
    rank: Rank,
    heads: range,
    layers: range,
    blocks: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    side: Side,
    move_unit: MoveUnit,
) -> np.ndarray:
    """int32 `[units, COORDINATES]` of one packet on one side."""
    sizes = counts // move_unit.states
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    groups = np.repeat(starts // move_unit.states, sizes) + within
    first = side.shape.heads_of(rank.tensor).start
    per_piece = side.layout.shape[N] // move_unit.states
    own = (np.arange(heads.start, heads.stop, move_unit.heads) - first) // move_unit.heads
    rows = np.empty((len(layers), len(groups), len(own), COORDINATES), np.int32)
    rows[..., 0] = np.arange(layers.start, layers.stop)[:, None, None]
    rows[..., 1] = np.repeat(blocks, sizes)[None, :, None]
    rows[..., 2], rows[..., 3] = (groups // per_piece)[None, :, None], (groups % per_piece)[None, :, None]
    rows[..., 4] = own
    return rows.reshape(-1, COORDINATES)


def _rounded(count: int) -> int:
    """`count` rounded up to a multiple of an eighth of the power of two below it."""
    step = max(1, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def _table(
    units: Mapping[Route, np.ndarray],
    slots: Mapping[Route, int],
    ranks: Mapping[Route, Rank],
    side: Side,
    length: int,
) -> np.ndarray:
    """Every packet in its rank's place, -1 elsewhere."""
    shape = (side.shape.tensor, side.shape.context, 1 + max(slots.values()), length, COORDINATES)
    table = np.full(shape, -1, np.int32)
    for route, rows in units.items():
        table[ranks[route]][slots[route], : len(rows)] = rows
    return table

"""Packets: all that one rank sends another, as tables of units that a gather or a scatter reads. Host-only.

A unit is a few states of a few heads of one layer, the same number of bytes in every packet of an exchange, in the same
order on both sides. Five coordinates name one: layer, block, kernel block in it, group of states, group of heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hkv.layout.orders import H, N
from hkv.mesh.parallel_shape import Rank
from hkv.mesh.resharding.plan import Move, Side

COORDINATES = 5


class Route(NamedTuple):
    """Sender, receiver and heads of a packet.

    Attributes:
      sender: the rank that packs it.
      receiver: the rank that unpacks it.
      heads: the heads it carries.
    """

    sender: Rank
    receiver: Rank
    heads: range


@dataclasses.dataclass(frozen=True)
class Grain:
    """The unit that every move is made of: static, so that few executables serve all plans.

    Attributes:
      states: consecutive states of a kernel block.
      heads: consecutive heads.
      heads_outside: whether the states of a head follow one another in a packet, as on both sides, or the heads of a
        state.
    """

    states: int
    heads: int
    heads_outside: bool


@dataclasses.dataclass(frozen=True)
class Packets:
    """One exchange.

    Attributes:
      grain: the unit.
      out_slots: place of each packet among its sender's.
      in_slots: place of each packet among its receiver's.
      read: int32 `[tensor, context, slots, units, COORDINATES]`, what each sender packs, -1 where there is nothing.
      written: likewise what each receiver unpacks.
    """

    grain: Grain
    out_slots: Mapping[Route, int]
    in_slots: Mapping[Route, int]
    read: np.ndarray
    written: np.ndarray


def make_packets(moves: Sequence[Move], layers: range, source: Side, target: Side) -> Packets:
    """The packets of some moves, at least one, each as long as the longest, rounded up by at most an eighth.

    Args:
      moves: all sends, or all forwards, of a plan.
      layers: layers that each packet carries.
      source: the side that sends.
      target: the side that receives.
    """
    routes: dict[Route, list[Move]] = {}
    for move in moves:
        routes.setdefault(Route(move.source, move.target, move.heads), []).append(move)
    spans = {route: _spans(each) for route, each in routes.items()}
    grain = _grain(spans, source, target)
    senders, receivers = {route: route.sender for route in routes}, {route: route.receiver for route in routes}
    out_slots, in_slots = _slots(senders), _slots(receivers)
    read: dict[Route, np.ndarray] = {}
    written: dict[Route, np.ndarray] = {}
    for route, (blocks, places, starts, goals, counts) in spans.items():
        read[route] = _units(route.sender, route.heads, layers, blocks, starts, counts, source, grain)
        written[route] = _units(route.receiver, route.heads, layers, places, goals, counts, target, grain)
    length = _rounded(max(map(len, read.values())))
    return Packets(
        grain,
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


def _grain(spans: Mapping[Route, np.ndarray], source: Side, target: Side) -> Grain:
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
    return Grain(states, heads, outside)


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
    grain: Grain,
) -> np.ndarray:
    """int32 `[units, COORDINATES]` of one packet on one side."""
    sizes = counts // grain.states
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    groups = np.repeat(starts // grain.states, sizes) + within
    first = side.shape.heads_of(rank.tensor).start
    per_piece = side.layout.shape[N] // grain.states
    own = (np.arange(heads.start, heads.stop, grain.heads) - first) // grain.heads
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

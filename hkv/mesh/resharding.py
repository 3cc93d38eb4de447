"""Plan of the transfers that move a request's cache from one parallel shape to another, as data. Host-only.

Prefill ranks and decode ranks may differ in tensor and context degree, interleave, block size, physical order and
kernel split; they cache the same parts of the same heads. Every byte that is missing at the target is sent once: of
source ranks that hold the same, one sends; of target ranks that need the same, one receives and forwards. Where
tensor ranks divide each other and no head is replicated, the pairs are RTP-LLM's (asymmetric prefill and decode).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from hkv.errors import LayoutError, PlanError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.mesh.parallel_shape import ParallelShape, Rank, head_axis, part_by_head, states_of_positions

Replicas = Literal["forward", "direct"]
"""Source of a target rank's bytes that other target ranks need too: one of them forwards, or each gets its own copy."""

HOLE = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A request's cache on one side: ranks, the layout of one rank's pool, and block ids by column.

    The row is the same on every rank; `null_block` stands for no block there, besides -1.

    Raises:
      ConfigError: an interleave that the layout does not allow.
      LayoutError: a layout of other heads than a rank holds.
      PlanError: a block that is not in the pool, or twice in the row.
    """

    shape: ParallelShape
    layout: Layout
    row: tuple[int, ...]
    null_block: int = 0

    def __post_init__(self) -> None:
        self.shape.check(self.layout)
        real = [block for block in self.row if block not in (HOLE, self.null_block)]
        for block in real:
            if type(block) is not int or not 0 <= block < self.layout.num_blocks:
                raise PlanError("row", block, f"block ids below {self.layout.num_blocks}, or {HOLE}")
        if len(set(real)) != len(real):
            raise PlanError("row", self.row, "each block once")

    def locate(self, state: int) -> tuple[int, int, int, int]:
        """`(column, part of the context ranks, state in the rank's block, states that follow it there, itself too)`."""
        column, inner = divmod(state, self.shape.virtual_states(self.layout))
        together = self.shape.interleave_states(self.layout)
        part, within = self.shape.split(inner, together)
        return column, part, within, together - inner % together

    def holders(self, tensor_ranks: range, part: int) -> tuple[Rank, ...]:
        """The ranks that hold those heads of that part of the tokens."""
        return tuple(Rank(t, c) for t in tensor_ranks for c in self.shape.context_ranks_of(part))


@dataclasses.dataclass(frozen=True, slots=True)
class StateRun:
    """States that follow one another in the request and in both blocks.

    `state` is the first, counted over the request; `source` and `target` are its places in the ranks' blocks.
    """

    state: int
    count: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Transfer from one rank's block to another's, alike in every layer. Heads have their numbers in the model.

    Where it is `forwarded`, the sender is a rank of the target side, which has it from the source by then.
    """

    source: Rank
    target: Rank
    source_block: int
    target_block: int
    heads: range
    forwarded: bool
    runs: tuple[StateRun, ...]

    @property
    def states(self) -> int:
        """States moved."""
        return sum(run.count for run in self.runs)


@dataclasses.dataclass(frozen=True, slots=True)
class ByteRun:
    """A gapless stretch of bytes in both pools."""

    source: int
    target: int
    count: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """All transfers that move one request's cache: sends from source to target, then forwards among target ranks."""

    source: Side
    target: Side
    layers: range
    sends: tuple[Move, ...]
    forwards: tuple[Move, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that cross from side to side."""
        return sum(self._bytes(move) for move in self.sends)

    @property
    def forwarded_bytes(self) -> int:
        """Bytes that go from one target rank to another."""
        return sum(self._bytes(move) for move in self.forwards)

    def _bytes(self, move: Move) -> int:
        shape, layout = self.target.shape, self.target.layout
        cell = sum(bytes_of_head(layout, part, shape.heads_per_rank) for part in layout.content)
        return cell * len(move.heads) * move.states * len(self.layers)

    def byte_runs(self, move: Move, layer: int) -> tuple[ByteRun, ...]:
        """The bytes of a move in one layer of the plan, joined where they touch on both sides, by rising target.

        This is what a transfer library is handed for each pair of ranks.
        """
        if layer not in self.layers:
            raise PlanError("layer", layer, f"one of {self.layers}")
        origin = self.target if move.forwarded else self.source
        return tuple(_joined(sorted(_cells(origin, self.target, move, layer), key=lambda run: run.target)))


def plan_resharding(
    source: Side,
    target: Side,
    positions: range,
    *,
    layers: range | None = None,
    replicas: Replicas = "forward",
) -> Plan:
    """The plan that brings some tokens of a request to the target.

    Where several source ranks hold the same, they take turns, target block by target block; so do target ranks that
    receive for others.

    Args:
      source: side that holds the cache.
      target: side that gets it; blocks of other columns than those of `positions` are not touched.
      positions: the tokens to bring: from the target's own hit on, or a window's `readable`. Columns of the row
        for a layer of snapshots, whose ranks count as its heads. States that tokens share are moved whole.
      layers: indices of layers; None for all.
      replicas: source for target ranks that hold the same: one of them forwards, or each gets its own copy.

    Raises:
      PlanError: the sides cache different heads or parts; positions or layers that are not there; a hole where a
        state should be; another `replicas`.
    """
    _check_sides(source, target)
    if replicas not in ("forward", "direct"):
        raise PlanError("replicas", replicas, "forward or direct")
    layers = range(source.layout.num_layers) if layers is None else layers
    if not layers or layers.step != 1 or layers.start < 0 or layers.stop > source.layout.num_layers:
        raise PlanError("layers", layers, f"consecutive layers, at least one, of {source.layout.num_layers}")
    if positions.step != 1 or positions.start < 0:
        raise PlanError("positions", positions, "consecutive positions, 0 or more")
    found: dict[tuple[Rank, Rank, int, int, range, bool], list[StateRun]] = {}
    shares = tuple(_shares(source.shape, target.shape))
    states = states_of_positions(source.layout, positions)
    for run, (column, part), (goal, target_part) in _runs(source, target, states):
        block, place = source.row[column], target.row[goal]
        again = dataclasses.replace(run, source=run.target)
        for heads, source_ranks, target_ranks in shares:
            givers, takers = source.holders(source_ranks, part), target.holders(target_ranks, target_part)
            for sender, receiver, forwarded in _hops(givers, takers, goal, replicas):
                key = (sender, receiver, place if forwarded else block, place, heads, forwarded)
                found.setdefault(key, []).append(again if forwarded else run)
    moves = tuple(Move(*key, tuple(runs)) for key, runs in found.items())
    sends = tuple(move for move in moves if not move.forwarded)
    return Plan(source, target, layers, sends, tuple(move for move in moves if move.forwarded))


def _hops(
    givers: Sequence[Rank], takers: Sequence[Rank], turn: int, replicas: Replicas
) -> Iterator[tuple[Rank, Rank, bool]]:
    """`(sender, receiver, forwarded)` until every one of `takers` has what each of `givers` holds."""
    if replicas == "direct":
        for index, taker in enumerate(takers):
            yield givers[(turn + index) % len(givers)], taker, False
        return
    first = takers[turn % len(takers)]
    yield givers[turn % len(givers)], first, False
    for taker in takers:
        if taker != first:
            yield first, taker, True


def _runs(source: Side, target: Side, states: range) -> Iterator[tuple[StateRun, tuple[int, int], tuple[int, int]]]:
    """The longest runs, each with `(column, part of the context ranks)` on the source and on the target."""
    state = states.start
    while state < states.stop:
        here, there = source.locate(state), target.locate(state)
        for name, side, column in (("source", source, here[0]), ("target", target, there[0])):
            block = side.row[column] if column < len(side.row) else HOLE
            if block in (HOLE, side.null_block):
                raise PlanError(f"{name}.row", block, f"a block in column {column}, which holds state {state}")
        count = min(here[3], there[3], states.stop - state)
        yield StateRun(state, count, here[2], there[2]), here[:2], there[:2]
        state += count


def _shares(source: ParallelShape, target: ParallelShape) -> Iterator[tuple[range, range, range]]:
    """Heads that lie together on both sides, with the tensor ranks that hold them there."""
    head = 0
    while head < source.heads:
        givers, takers = source.tensor_ranks_of(head), target.tensor_ranks_of(head)
        stop = min(source.heads_of(givers.start).stop, target.heads_of(takers.start).stop)
        yield range(head, stop), givers, takers
        head = stop


def _cells(origin: Side, target: Side, move: Move, layer: int) -> Iterator[ByteRun]:
    """The bytes of every part of every head and state of a move."""
    here, there = origin.shape.heads_of(move.source.tensor).start, target.shape.heads_of(move.target.tensor).start
    for part in target.layout.content:
        views = [
            part_by_head(side.layout, side.layout.part(part.name), side.shape.heads_per_rank)
            for side in (origin, target)
        ]
        count = bytes_of_head(target.layout, part, target.shape.heads_per_rank)
        rest = (0,) * (len(views[0].shape) - 5)
        for run in move.runs:
            for state in range(run.count):
                for head in move.heads:
                    at = _grouped(origin.layout, run.source + state)
                    to = _grouped(target.layout, run.target + state)
                    yield ByteRun(
                        views[0].address(layer, move.source_block, *at, head - here, *rest),
                        views[1].address(layer, move.target_block, *to, head - there, *rest),
                        count,
                    )


def _grouped(layout: Layout, state: int) -> tuple[int, int]:
    return divmod(state, layout.shape[3])


def _joined(runs: Sequence[ByteRun]) -> Iterator[ByteRun]:
    current: ByteRun | None = None
    for run in runs:
        if current and (current.source + current.count, current.target + current.count) == (run.source, run.target):
            current = ByteRun(current.source, current.target, current.count + run.count)
            continue
        if current:
            yield current
        current = run
    if current:
        yield current


def bytes_of_head(layout: Layout, part: Part, heads: int) -> int:
    """Bytes of one head's share of a part in one state, which lie without a gap."""
    return part.nbytes // heads if head_axis(layout, part, heads) == 2 else part.nbytes


def _check_sides(source: Side, target: Side) -> None:
    """Raises PlanError unless both cache the same parts of the same heads of the same layers."""
    for name in ("num_layers", "tokens_per_state"):
        have, want = getattr(source.layout, name), getattr(target.layout, name)
        if have != want:
            raise PlanError(f"target.layout.{name}", want, f"{have}, as on the source")
    if source.shape.heads != target.shape.heads:
        raise PlanError("target.shape.heads", target.shape.heads, f"{source.shape.heads}, as on the source")
    have, want = ({p.name: _content(side, p) for p in side.layout.content} for side in (source, target))
    if have != want:
        raise PlanError("target.layout.content", want, f"{have}, as on the source")


def _content(side: Side, part: Part) -> tuple[str, tuple[int, ...]]:
    try:
        view = part_by_head(side.layout, part, side.shape.heads_per_rank)
    except LayoutError as error:
        raise PlanError("layout", side.layout.order.value, error.expected) from error
    return part.dtype, view.shape[5:]

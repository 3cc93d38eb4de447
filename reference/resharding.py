"""Moving a cache between parallel shapes by definition: a dictionary of which rank has and needs what.

The twin of `hkv.mesh.resharding`. An identity is (part, layer, head, state of the request); nothing here is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from hkv.mesh.resharding import Plan, Side
from reference.sharding import RankIndex, homes

Identity = tuple[str, int, int, int]
Places = dict[Identity, dict[RankIndex, tuple[int, int]]]
"""Ranks that hold each identity, each with the first byte in its pool and the number of bytes."""


def holdings(side: Side, first: int, stop: int, layers: range) -> Places:
    """Holders of the request's states from `first` to `stop` (in states, not tokens)."""
    columns = {block: column for column, block in enumerate(side.row)}
    per_block = 0
    found: list[tuple[str, int, int, int, int, RankIndex, int, int]] = []
    for home in homes(side.shape, side.layout):
        per_block = max(per_block, home.state + 1)
        if home.block in columns and home.block != side.null_block and home.layer in layers:
            found.append((*home[:2], columns[home.block], *home[3:]))
    places: Places = {}
    for part, layer, column, head, state, rank, start, nbytes in found:
        if first <= column * per_block + state < stop:
            identity = (part, layer, head, column * per_block + state)
            places.setdefault(identity, {})[rank] = (start, nbytes)
    return places


def faults(plan: Plan, first: int, stop: int, direct: bool = False) -> Iterator[str]:
    """Errors in a plan for the states from `first` to `stop`: none, if it is right.

    Every byte that a target rank needs arrives there once, from a rank that has that very byte by then; nothing else
    arrives; and unless each rank gets its own (`direct`), every byte crosses from side to side once.
    """
    have, need = holdings(plan.source, first, stop, plan.layers), holdings(plan.target, first, stop, plan.layers)
    had, needed = _bytes(have), _bytes(need)
    arrived: set[tuple[RankIndex, int]] = set()
    crossed: list[tuple[Identity, int]] = []
    for moves, owner in ((plan.sends, had), (plan.forwards, needed)):
        before = set(arrived)
        for move in moves:
            for layer in plan.layers:
                for run in plan.byte_runs(move, layer):
                    for byte in range(run.count):
                        origin = (move.source, run.source + byte)
                        goal = (move.target, run.target + byte)
                        if goal in arrived:
                            yield f"byte {goal} arrives twice"
                        arrived.add(goal)
                        if owner is needed and origin not in before:
                            yield f"byte {origin} is forwarded before it is there"
                        if goal not in needed:
                            yield f"byte {goal} is not needed"
                        elif owner.get(origin) != needed[goal]:
                            yield f"byte {goal} should be {needed[goal]}, but {owner.get(origin)} is sent"
                        elif owner is had:
                            crossed.append(needed[goal])
    if missing := set(needed) - arrived:
        yield f"{len(missing)} bytes are missing"
    if not direct and len(set(crossed)) != len(crossed):
        yield f"{len(crossed) - len(set(crossed))} bytes cross more than once"
    if plan.sent_bytes != len(crossed) or plan.forwarded_bytes != len(arrived) - len(crossed):
        yield f"{plan.sent_bytes} and {plan.forwarded_bytes} bytes are announced, {len(crossed)} cross"


def _bytes(places: Places) -> dict[tuple[RankIndex, int], tuple[Identity, int]]:
    """Identity of every byte of every rank's pool that belongs to one, and the byte's index in it."""
    return {
        (rank, start + byte): (identity, byte)
        for identity, ranks in places.items()
        for rank, (start, nbytes) in ranks.items()
        for byte in range(nbytes)
    }


def fill(pools: Mapping[RankIndex, np.ndarray], places: Places, content: Callable[..., bytes]) -> None:
    """Writes what a cold run would have computed to every place.

    Args:
      pools: bytes of every rank, changed in place.
      places: from `holdings`.
      content: of (part, layer, head, state, rank, bytes).
    """
    for identity, ranks in places.items():
        for rank, (start, nbytes) in ranks.items():
            pools[rank][start : start + nbytes] = np.frombuffer(content(*identity, rank, nbytes), np.uint8)


def execute(plan: Plan, source: Mapping[RankIndex, np.ndarray], target: Mapping[RankIndex, np.ndarray]) -> None:
    """Copies what the plan says, run by run; the target's bytes are changed in place."""
    for moves, pools in ((plan.sends, source), (plan.forwards, target)):
        for move in moves:
            for layer in plan.layers:
                for run in plan.byte_runs(move, layer):
                    piece = pools[move.source][run.source : run.source + run.count]
                    target[move.target][run.target : run.target + run.count] = piece

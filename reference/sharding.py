"""Holders of heads and tokens, found by dealing them out one after the other: the twin of `hkv.mesh.parallel_shape`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

import numpy as np

from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.mesh.parallel_shape import ParallelShape

RankIndex = tuple[int, int]
"""(tensor, context)."""


def head_holders(heads: int, tensor: int) -> list[list[int]]:
    """Tensor ranks that hold each head: heads are dealt to ranks in order, or ranks to heads."""
    if heads >= tensor:
        return [[rank] for rank in range(tensor) for _ in range(heads // tensor)]
    ranks = iter(range(tensor))
    return [[next(ranks) for _ in range(tensor // heads)] for _ in range(heads)]


def dealt_states(states: int, ranks: int, together: int) -> list[tuple[int, int]]:
    """`(rank, state on that rank)` of every state of a virtual block, dealt `together` at a time like cards."""
    hands = [0] * ranks
    places: list[tuple[int, int]] = []
    while len(places) < states * ranks:
        rank = len(places) // together % ranks
        for _ in range(together):
            places.append((rank, hands[rank]))
            hands[rank] += 1
    return places


def states_together(shape: ParallelShape, layout: Layout) -> int:
    """States that are dealt at once."""
    if shape.interleave is None or layout.tokens_per_state is None:
        return layout.states_per_block
    return int(shape.interleave / layout.tokens_per_state)


class Home(NamedTuple):
    """Place of one head's share of one part of one state.

    Attributes:
      part: name of the part.
      layer: index of the layer.
      block: block id.
      head: among all ranks' heads.
      state: in the virtual block.
      rank: the rank that holds it.
      start: first byte in that rank's pool.
      nbytes: bytes, without a gap.
    """

    part: str
    layer: int
    block: int
    head: int
    state: int
    rank: RankIndex
    start: int
    nbytes: int


def homes(shape: ParallelShape, layout: Layout) -> Iterator[Home]:
    """Every place of a cache, replicas included.

    Args:
      shape: ranks and what each holds.
      layout: of one rank.
    """
    split = shape.interleave is not None and shape.context > 1
    ranks = shape.context if split else 1
    places = dealt_states(layout.states_per_block, ranks, states_together(shape, layout) if split else 1)
    holders = head_holders(shape.heads, shape.tensor)
    for part in layout.content:
        for layer in range(layout.num_layers):
            for block in range(layout.num_blocks):
                for head, tensor_ranks in enumerate(holders):
                    own = [each for each, ranks_of in enumerate(holders) if ranks_of == tensor_ranks].index(head)
                    for state, (holder, within) in enumerate(places):
                        start, nbytes = _place(layout, part, layer, block, own, within)
                        for tensor in tensor_ranks:
                            for context in [holder] if split else range(shape.context):
                                yield Home(part.name, layer, block, head, state, (tensor, context), start, nbytes)


def _place(layout: Layout, part: Part, layer: int, block: int, head: int, state: int) -> tuple[int, int]:
    """First byte and bytes of one head's share of a part in one state of one rank."""
    if part.heads == 1 and len(part.shape) == 2:
        start = layout.element_address(part.name, layer, block, 0, state, head, 0)
        return start, part.nbytes // part.shape[0]
    index = (0,) * len(part.shape)
    return layout.element_address(part.name, layer, block, head, state, *index), part.nbytes


def spread(
    whole: np.ndarray,
    whole_layout: Layout,
    shape: ParallelShape,
    layout: Layout,
    pools: MutableMapping[RankIndex, np.ndarray],
) -> None:
    """Puts every element of one device's pool where the ranks hold it; bytes of no element stay.

    Args:
      whole: bytes of a pool of every head and of virtual blocks.
      whole_layout: its layout.
      shape: ranks and what each holds.
      layout: of one rank.
      pools: bytes of every rank's pool, changed in place.
    """
    alone = ParallelShape(heads=shape.heads)
    source: Mapping[tuple[str, int, int, int, int], int] = {home[:5]: home.start for home in homes(alone, whole_layout)}
    for home in homes(shape, layout):
        start = source[home[:5]]
        pools[home.rank][home.start : home.start + home.nbytes] = whole[start : start + home.nbytes]

"""Mapping of a cache's heads and tokens to ranks. Host-only arithmetic, for one group of layers.

Heads are split over `tensor` ranks, tokens over `context` ranks, requests over `data` replicas. Consecutive tensor
ranks share a head where there are fewer heads than ranks (vLLM 0.33 `get_num_kv_heads`). Tokens are dealt out like
cards, `interleave` at a time (vLLM 0.33 `BlockTables`; RTP-LLM `CPSlotMapper` deals whole blocks).
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

from hkv.errors import ConfigError, LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.layout.orders import H
from hkv.layout.strided import StridedView


class Rank(NamedTuple):
    """One rank of a replica: indices of its part of the heads and of its part of the tokens."""

    tensor: int
    context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelShape:
    """Split of one group's cache over ranks.

    A block id names one block on every rank of a replica; together they are a virtual block of
    `block_size * token_ranks` tokens. With 2 heads, `tensor=2, context=4` is what vLLM calls 8 tensor-parallel ranks
    of which 4 in a row are context-parallel: rank `tensor * 4 + context`.

    Attributes:
      heads: KV heads of a layer on all ranks together, 1 for a latent.
      data: replicas, each with its own requests and its own pool.
      tensor: ranks that split the heads, a divisor or a multiple of them.
      context: ranks that split the tokens.
      interleave: tokens that stay together on a context rank; the block's size deals whole blocks. None for a group
        whose tokens every context rank holds (not `cp_sharded`).
    """

    heads: int
    data: int = 1
    tensor: int = 1
    context: int = 1
    interleave: int | None = 1

    def __post_init__(self) -> None:
        for name in ("heads", "data", "tensor", "context"):
            _check_positive(name, getattr(self, name))
        if self.interleave is not None:
            _check_positive("interleave", self.interleave)
        if self.heads % self.tensor and self.tensor % self.heads:
            raise ConfigError("tensor", self.tensor, f"a divisor or a multiple of the {self.heads} heads")

    @property
    def heads_per_rank(self) -> int:
        """Heads that one tensor rank holds."""
        return max(1, self.heads // self.tensor)

    @property
    def head_replicas(self) -> int:
        """Consecutive tensor ranks that hold the same heads."""
        return max(1, self.tensor // self.heads)

    @property
    def token_ranks(self) -> int:
        """Context ranks that split the tokens: 1 where each holds them all."""
        return 1 if self.interleave is None else self.context

    @property
    def token_replicas(self) -> int:
        """Context ranks that hold the same tokens."""
        return self.context // self.token_ranks

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of a replica, context innermost."""
        return tuple(Rank(tensor, context) for tensor in range(self.tensor) for context in range(self.context))

    def heads_of(self, tensor: int) -> range:
        """The heads on a tensor rank."""
        _check_index("tensor rank", tensor, self.tensor)
        first = tensor // self.head_replicas * self.heads_per_rank
        return range(first, first + self.heads_per_rank)

    def tensor_ranks_of(self, head: int) -> range:
        """The tensor ranks that hold a head."""
        _check_index("head", head, self.heads)
        first = head // self.heads_per_rank * self.head_replicas
        return range(first, first + self.head_replicas)

    def context_ranks_of(self, part: int) -> range:
        """The context ranks that hold the tokens of one of the `token_ranks` parts."""
        _check_index("context rank", part, self.token_ranks)
        return range(self.context) if self.token_replicas > 1 else range(part, part + 1)

    def split(self, state: Any, interleave: int) -> tuple[Any, Any]:
        """`(context rank, state in its block)` of a state of a virtual block; plain integers, NumPy or JAX arrays."""
        group = interleave * self.token_ranks
        return state // interleave % self.token_ranks, state // group * interleave + state % interleave

    def interleave_states(self, layout: Layout) -> int:
        """States that stay together on a context rank, of one rank's layout; a whole block where tokens are not split.

        Raises:
          ConfigError: the interleave cuts a state, or does not divide the block; or the block is a snapshot, whose
            tokens cannot be split.
        """
        states = layout.states_per_block
        if self.interleave is None or self.context == 1:
            return states
        if layout.tokens_per_state is None:
            raise ConfigError("interleave", self.interleave, "None: a snapshot block is not split over context ranks")
        together = Fraction(self.interleave) / Fraction(layout.tokens_per_state)
        if together.denominator != 1 or states % int(together):
            tokens = states * Fraction(layout.tokens_per_state)
            expected = f"whole states of {layout.tokens_per_state} tokens that divide a block of {tokens} tokens"
            raise ConfigError("interleave", self.interleave, expected)
        return int(together)

    def virtual_states(self, layout: Layout) -> int:
        """States of a virtual block, all ranks together."""
        return layout.states_per_block * self.token_ranks

    def check(self, layout: Layout) -> None:
        """Raises ConfigError or LayoutError unless a layout is one rank's of this shape: its states, its heads."""
        self.interleave_states(layout)
        for part in layout.content:
            head_axis(layout, part, self.heads_per_rank)


def head_axis(layout: Layout, part: Part, heads: int) -> int:
    """Axis of `[tokens, heads, *part.shape]` that counts heads: 1, or 2 in `kv_planes`, where heads share a slot.

    Raises:
      LayoutError: the part has another number of heads than `heads`, those of one rank.
    """
    together = part.heads is not None and len(part.shape) == 2
    found = part.shape[0] if together else layout.shape[H] if part.heads is None else part.heads
    if found != heads:
        expected = f"{heads} heads, as many as the shape gives a rank"
        raise LayoutError("layout", f"{part.name} of {found} heads", expected)
    return 2 if together else 1


def part_by_head(layout: Layout, part: Part, heads: int) -> StridedView:
    """One part as `[layers, blocks, kernel blocks of a block, states, heads, *elements of a head]`."""
    cells = layout.part_cells(part.name)
    keep = (0, 1, 2, 4, 3, *range(5, len(cells.shape)))
    if head_axis(layout, part, heads) == 2:
        keep = (0, 1, 2, 4, 5, *range(6, len(cells.shape)))
    shape, strides = tuple(cells.shape[a] for a in keep), tuple(cells.strides[a] for a in keep)
    return StridedView(shape, strides, cells.offset, cells.dtype)


def states_of_positions(layout: Layout, positions: range) -> range:
    """States that hold some consecutive tokens, counted over the request; a snapshot's positions are its columns."""
    if layout.tokens_per_state is None:
        return positions
    tokens = Fraction(layout.tokens_per_state)
    return range(positions.start // tokens, -(-positions.stop // tokens)) if positions else range(0)


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(name, value, "a positive integer")


def _check_index(name: str, value: object, extent: int) -> None:
    if type(value) is not int or not 0 <= value < extent:
        raise ConfigError(name, value, f"an integer from 0 to {extent - 1}")

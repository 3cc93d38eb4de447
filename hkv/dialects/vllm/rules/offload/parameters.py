"""Parameters of a second tier: of its groups, of itself, and what transfers take."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from hkv.state import loops
from hkv.state.loops import Scalar


class TierField(enum.IntEnum):
    """Columns of the tier's parameters of a group."""

    WINDOW = 0
    """Chunks before a length that resuming there takes; 0 for all."""
    SPAN = 1
    """Tokens before a query that a sliding window keeps; -1 for other groups."""
    ORDER = 2
    """Of row j, the group that is looked up as the j-th."""
    MASKED = 3
    """1 if only some chunks are offered: the last KEEP of every PERIOD, and those before expected ends."""
    KEEP = 4
    PERIOD = 5
    ENDS = 6
    """1 if the prompt's end and the shared prefix are expected ends, rounded down to ALIGNMENT."""
    HORIZON = 7
    """1 if the last segment's end is one."""
    STATE = 8
    """1 if chunks are states, which the cache hands over; the request offers none itself."""


class TierNumber(enum.IntEnum):
    """Columns of the tier's other parameters."""

    CAPACITY = 0
    WINDOWS = 1
    """The place in the order of lookups of the first group that needs the last chunks alone."""
    PROMPT_ONLY = 2
    ALIGNMENT = 3
    WHOLE_HEADS = 4
    """1 if the head that the GPU has counts as used when the tail is loaded."""
    LIMITED = 5
    """1 if transfers take more than a step."""
    SLOWER = 6
    """1 if it is asked which loads took longer than computing again."""
    THRESHOLD = 7
    TRACKED = 8
    """Chunks whose offers are counted at most."""
    GRID = 9
    """Tokens that a lookup's length is rounded down to beside states, before any group is asked; else 1."""
    REVIVES = 10
    """1 if blocks of chunks that were offered once count as the request's, though they were handed out since."""


TIER_WORDS = 11


@dataclasses.dataclass(frozen=True)
class TierView:
    """A tier's parameters.

    Attributes:
      groups: int32[groups * 11], `TierField`.
      numbers: int32[11], `TierNumber`.
      moved: int32[3 * entries], of so many chunks: steps that moving them takes, and bytes more, in two words.
      rate: int32[2], bytes of a step, in two words.
      beaten: int32[entries], of so many chunks, most tokens that would be computed again sooner.
      names: int32[requests], places of the requests' names in order.
    """

    groups: jax.Array
    numbers: jax.Array
    moved: jax.Array
    rate: jax.Array
    beaten: jax.Array
    names: jax.Array

    def group(self, group: Any, field: TierField) -> Scalar:
        """A parameter of a group."""
        return loops.read(self.groups, group * TIER_WORDS + int(field))

    def number(self, number: TierNumber) -> Scalar:
        """Another parameter."""
        return loops.read(self.numbers, jnp.int32(int(number)))

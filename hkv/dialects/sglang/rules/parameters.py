"""A configuration as data: a small array that every compiled rule reads, so that configurations share executables."""

from __future__ import annotations

import dataclasses
import enum

import jax
import numpy as np

from hkv.dialects.sglang.config import DECODE_LOSES_PAGE, POLICIES, SPLIT_TOUCHES_SUFFIX, STRANDS_FULL, SGLangConfig
from hkv.state import loops
from hkv.state.loops import Scalar

Field = enum.IntEnum(
    "Field",
    "PAGE WINDOW EAGLE TOUCHES LOSES TOTAL POLICY STRANDS SORT STATES TRACKED MOST GRID EVERY",
    start=0,
)
"""Columns of `SGLangParameters.cache`.

PAGE: tokens of a page. WINDOW: tokens that a window reads, 0 without one. EAGLE: 1 if keys are bigrams, so that
n tokens make n - 1 units. TOUCHES: 1 if a split makes the lower part the most recently used
(`hkv.dialects.sglang.config.SPLIT_TOUCHES_SUFFIX`). LOSES: 1 if a refused decode loses a page (`DECODE_LOSES_PAGE`).
TOTAL: pages of all pools, and states. POLICY: place in `POLICIES`. STRANDS: 1 if a tombstone that nothing comes after
any more stays (`STRANDS_FULL`). SORT: 1 if freed pages wait to be sorted in. STATES: states, 0 where no layer has one.
TRACKED: 1 if requests keep states of lengths that they have passed. MOST: most states on a path, -1 for any number.
GRID: `SGLangConfig.state_grid`. EVERY: `SGLangConfig.track_interval`.
"""

FIELDS = 16
"""Columns of the array."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SGLangParameters:
    """A configuration as traced data.

    Attributes:
      cache: int32[16], one value for each `Field`.
    """

    cache: jax.Array


@dataclasses.dataclass(frozen=True)
class SGLangView:
    """A lane of `SGLangParameters`, read field by field.

    Attributes:
      cache: int32[lanes * 16], lanes one after the other.
      lane: the lane to read; None if there is only one.
    """

    cache: jax.Array
    lane: Scalar | None

    def whole(self, field: Field) -> Scalar:
        """A field."""
        # One row a lane: configurations are data, and lanes of different ones run in one program.
        base = 0 if self.lane is None else self.lane * FIELDS
        return loops.read(self.cache, base + int(field))

    @property
    def page(self) -> Scalar:
        """Tokens of a page."""
        return self.whole(Field.PAGE)

    @property
    def windowed(self) -> Scalar:
        """True if there is a window's pool."""
        return self.whole(Field.WINDOW) > 0

    @property
    def stateful(self) -> Scalar:
        """True if there is a pool of states."""
        return self.whole(Field.STATES) > 0

    def flag(self, field: Field) -> Scalar:
        """A field that says yes or no."""
        return self.whole(field) != 0


def of_config(config: SGLangConfig) -> SGLangParameters:
    """A configuration as a NumPy array."""
    values = {
        Field.PAGE: config.page_size,
        Field.WINDOW: config.window or 0,
        Field.EAGLE: config.bigrams,
        Field.TOUCHES: SPLIT_TOUCHES_SUFFIX in config.bugs,
        # Pages of one token are taken of both pools or of neither, as of SGLang's own `alloc`.
        Field.LOSES: DECODE_LOSES_PAGE in config.bugs and config.page_size > 1,
        Field.POLICY: POLICIES.index(config.policy),
        Field.SORT: config.need_sort,
        Field.STRANDS: STRANDS_FULL in config.bugs,
        Field.TOTAL: sum(config.num_slots) // config.page_size + (config.states or 0),
        Field.STATES: config.states or 0,
        Field.TRACKED: config.tracked,
        Field.MOST: config.most_states,
        Field.GRID: config.state_grid,
        Field.EVERY: config.track_interval,
    }
    cache = np.zeros(FIELDS, np.int32)
    for field, value in values.items():
        cache[field] = value
    return SGLangParameters(cache=cache)  # type: ignore[arg-type]

"""Hypothesis strategies: configurations, traffic, cached sets and calls of kernels that shrink to small ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from hkv.contract import registry
from hkv.errors import MissingExtraError
from hkv.layout.views.numpy import numpy_dtype
from hkv.model.topology import Topology
from hkv.oracle.record import ALL, Only
from hkv.oracle.record import draw as draw_seeded
from hkv.spec import LayerSpec
from hkv.spec.dtypes import item_bytes
from hkv.testing.kernels.cases import Case, Supports
from hkv.testing.kernels.drawing import draw_case
from hkv.testing.kernels.placement import Placement

try:
    from hypothesis import assume
    from hypothesis import strategies as st
except ImportError:
    raise MissingExtraError("hypothesis", "testing", "for random configurations that shrink") from None

T = TypeVar("T")

POOL = (3, 40)
"""Fewest and most blocks of a pool that traffic is driven through: small, so that it evicts and refuses."""


SEEDS = 1 << 20
"""Seeds from which restricted configurations are drawn."""


class Drawing(Protocol):
    """Object that draws from strategies: the one that `hypothesis.strategies.data()` gives a test."""

    def draw(self, strategy: st.SearchStrategy[T], label: Any = None) -> T:
        """One value of a strategy."""
        ...


class HypothesisChoices:
    """Decisions drawn by Hypothesis, so that a failure shrinks. See `hkv.contract.traffic.Choices`.

    Args:
      data: Hypothesis's object that draws.
    """

    def __init__(self, data: Drawing) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included; shrinks towards `low`."""
        return self._data.draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        """True in about `percent` of 100 cases; shrinks towards False."""
        return self._data.draw(st.integers(0, 99)) >= 100 - percent

    def pick(self, sequence: Sequence[T]) -> T:
        """One element; shrinks towards the first."""
        return self._data.draw(st.sampled_from(sequence))


class _Composed:
    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def draw(self, strategy: st.SearchStrategy[T], label: Any = None) -> T:
        return self._draw(strategy)


@st.composite
def headers(draw: Callable[..., Any], features: Sequence[str] = (), version: int = 2, only: Only = ALL) -> Any:
    """Configurations of one of these features, as a log's first line; where there is one pool, it has 3 to 40 blocks.

    Args:
      draw: given by Hypothesis.
      features: those to choose from, of the dialect's `features`; none for all whose logs are short.
      version: of the log format.
      only: selection of the configurations, and their dialect, as for `hkv diff`; a restricted one is found by its
        seed, and shrinks to another.

    Raises:
      ConfigError: a feature that has no configuration of the wanted kind.
    """
    rules = registry.dialect_of(only.dialect)
    choices = HypothesisChoices(_Composed(draw))
    feature = choices.pick(features or rules.short_features(only.dialect))
    if only == Only(dialect=only.dialect):
        header = rules.draw_header(choices, feature, version, only.dialect)
    else:
        header = draw_seeded(feature, choices.integer(0, SEEDS), version, only)[0]
    if not isinstance(header.num_blocks, int):
        return header
    return msgspec.structs.replace(header, num_blocks=choices.integer(*POOL))


@st.composite
def topologies(draw: Callable[..., Any], features: Sequence[str] = (), dialect: str = registry.DEFAULT) -> Topology:
    """Groups of any kinds that a dialect has, some of them EAGLE groups."""
    only = Only(dialect=dialect)
    return registry.dialect_of(dialect).topology(draw(headers(features, only=only)))


@st.composite
def specs(draw: Callable[..., Any], features: Sequence[str] = (), dialect: str = registry.DEFAULT) -> LayerSpec:
    """Strategy for one layer's cache description, of any kind that a dialect has."""
    return draw(st.sampled_from(draw(topologies(features, dialect)).specs))


@st.composite
def hit_cases(draw: Callable[..., Any], dialect: str = registry.DEFAULT) -> Any:
    """A request and any set of cached prefixes of it, as the dialect's `draw_hit_case` makes them."""
    return registry.dialect_of(dialect).draw_hit_case(HypothesisChoices(_Composed(draw)))


# Calls of kernels: layouts, tables, slot mappings and contents of pages.


@st.composite
def kernel_cases(draw: Callable[..., Any], operation: str = "write", **supports: Any) -> Case:
    """Calls of one operation on small pools of any layout, for `hkv.testing.kernels.assert_writes_like(case=...)`.

    Args:
      draw: given by Hypothesis.
      operation: `write`, `gather`, `scatter`, `copy_blocks`, `zero`, `pack`, `unpack` or `attention`.
      supports: fields of `hkv.testing.kernels.Supports`; what it excludes is not drawn.
    """
    asked = Supports(operation=operation, **supports)
    choices = HypothesisChoices(_Composed(draw))
    case = draw_case(choices, asked, wide=choices.chance(5))
    assume(not asked.not_asked(case))
    return case


def placements(**supports: Any) -> st.SearchStrategy[Placement]:
    """Layouts of pools: the six orders, keys and values apart, pools of kernel blocks; `supports` as for cases."""
    return kernel_cases("gather", **supports).map(lambda case: case.placement())


@st.composite
def block_tables(draw: Callable[..., Any], num_blocks: int, columns: int = 4, null_block: int = 0) -> list[int]:
    """Rows of a block table: no block twice, the null block and -1 here and there."""
    blocks = draw(st.permutations([block for block in range(num_blocks) if block != null_block]))
    kept = draw(st.lists(st.sampled_from((True, True, True, False)), min_size=columns, max_size=columns))
    rest = draw(st.lists(st.sampled_from((null_block, -1)), min_size=columns, max_size=columns))
    return [blocks[i] if kept[i] and i < len(blocks) else rest[i] for i in range(columns)]


@st.composite
def slot_mappings(draw: Callable[..., Any], num_blocks: int, block_size: int, tokens: int = 5) -> list[int]:
    """Slots of new tokens, `block * block_size + slot`, none twice, -1 for padding; block 0 is a block like others."""
    slots = draw(st.permutations(range(num_blocks * block_size)))
    kept = draw(st.lists(st.sampled_from((True, True, True, False)), min_size=tokens, max_size=tokens))
    return [slots[i] if kept[i] and i < len(slots) else -1 for i in range(tokens)]


def page_contents(shape: Sequence[int], dtype: str) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any bits: NaN payloads, infinities and subnormal numbers among them."""
    size = math.prod(shape) * item_bytes(dtype)
    made = st.binary(min_size=size, max_size=size)
    return made.map(lambda bits: np.frombuffer(bits, np.uint8).copy().view(numpy_dtype(dtype)).reshape(tuple(shape)))

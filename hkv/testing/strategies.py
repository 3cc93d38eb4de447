"""Hypothesis strategies: configurations, traffic and cached sets that shrink to small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from hkv.contract import registry
from hkv.errors import MissingExtraError
from hkv.model.topology import Topology
from hkv.oracle.record import ALL, Only
from hkv.oracle.record import draw as draw_seeded
from hkv.spec import LayerSpec

try:
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
      ConfigError: a feature that has no configuration of the wanted sort.
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

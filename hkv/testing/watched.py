"""An engine under every invariant of its dialect, and random traffic through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.oracle.broken_invariant import Watching
from hkv.oracle.record import Only, features_of


class Watch:
    """Performs operations on an engine, and asks every invariant of its dialect after each.

    Args:
      engine: the engine.
      header: its configuration, as a log's first line has it; names the dialect.

    Raises:
      UnsupportedConfigError: the dialect has no invariants.
    """

    def __init__(self, engine: Any, header: Any) -> None:
        self._watch = registry.dialect_of(header.dialect).watch(engine, header)

    def perform(self, operation: Any) -> Any:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """
        return self._watch.perform(operation)


def run_watched(
    factory: EngineFactory,
    *,
    dialect: str = registry.DEFAULT,
    features: Sequence[str] = (),
    seeds: int = 5,
    first_seed: int = 0,
    kinds: Iterable[str] = (),
    max_groups: int | None = None,
    version: int | None = None,
    steps: int = 16,
) -> int:
    """Drives an engine through random traffic under every invariant of its dialect.

    Seeds whose configuration the engine says it does not implement are left out.

    Args:
      factory: makes an empty engine of a header.
      dialect: name of the dialect, as headers give it.
      features: features of the traffic; none for every feature of the dialect.
      seeds: number of seeds a feature.
      first_seed: the first of them.
      kinds: only groups of these kinds; none for all.
      max_groups: most groups; None for any number.
      version: of the log format; None for the newest.
      steps: scheduling steps a seed.

    Returns:
      Operations performed.

    Raises:
      InvariantError: an invariant does not hold; names it and the operation.
      ConfigError: the engine implements none of the configurations.
    """
    rules, only = registry.dialect_of(dialect), Only(frozenset(kinds), max_groups, dialect)
    watching = Watching(factory, only, rules.drawn_versions(only.kinds)[-1] if version is None else version, steps)
    for feature in tuple(features) or features_of(only, version):
        for seed in range(first_seed, first_seed + seeds):
            found = watching.seed(feature, seed)
            if found is not None:
                raise found.error
    watching.require_some()
    return watching.performed

"""A comparison of two engines by the machines of a Ray cluster: stretches of seeds, counted as one process would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hkv.cluster import in_cluster
from hkv.oracle.comparison import Comparison, Tally

STRETCH = 25
"""Seeds that one processor compares at a time."""

Stretch = tuple[str, range]
"""A feature, and seeds."""


def compare_in_cluster(
    comparison: Comparison,
    arguments: Sequence[Any],
    features: Sequence[str],
    seeds: range,
    address: str,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Compares two engines on all seeds of each feature, up to the first on which they differ.

    That one is compared here once more, so that it can be made small here.

    Args:
      comparison: gets the counts and the differences, those of one process that goes through the seeds in order.
      arguments: those that it was made from; its engines are names.
      features: features of the traffic.
      seeds: seeds of each.
      address: the cluster's, as `hkv.cluster.in_cluster` takes it.
      progress: called for each seed.

    Raises:
      HKVError: no cluster, an engine that cannot start there, or one that differs there but not here.
    """
    places = range(0, len(seeds), STRETCH)
    stretches = [(feature, seeds[place : place + STRETCH]) for feature in features for place in places]
    found: dict[int, Tally] = {}
    for place, tally in in_cluster(_compared, stretches, tuple(arguments), address):
        found[place] = tally
        for _ in stretches[place][1]:
            progress()
    parted: set[str] = set()
    for place, (feature, _) in enumerate(stretches):
        if feature not in parted and comparison.add(feature, found[place]):
            parted.add(feature)


def _compared(stretch: Stretch, arguments: tuple[Any, ...]) -> Tally:
    return Comparison(*arguments).stretch(*stretch)

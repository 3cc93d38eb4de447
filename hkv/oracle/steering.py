"""Traffic steered by what the reference does: configurations under which seeds reached what hardly any other does.

A record of the branches and rules that a dialect's reference went through, seed by seed, is made for it
(`benchmarks/reached_branches.py`); `choose` picks the seeds that together reach everything, what is seldom reached
first, and their configurations are kept with the dialect. The feature `STEERED` of random traffic goes through them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from hkv.contract.traffic import Kept, RandomChoices

TIMES = 3
"""Kept configurations that everything is to be reached by, where so many seeds reach it."""

EACH = 2
"""Kept configurations of each feature, at least."""

Name = TypeVar("Name", bound=Hashable)


def choose(reached: Mapping[Name, frozenset[Hashable]], count: int, sort: Callable[[Name], Hashable]) -> list[Name]:
    """Names whose sets together hold as much as possible, elements of few sets first.

    Each element counts by the inverse of the number of sets that hold it, half as much each time that one is chosen
    which holds it, until `TIMES` are. The first name wins among equals. The first names are one of each sort, `EACH`
    times over, the others of any.

    Args:
      reached: what each name reached.
      count: most names.
      sort: sort of a name.
    """
    often = collections.Counter(element for elements in reached.values() for element in elements)
    worth = {element: 1 / times for element, times in often.items()}
    had = dict.fromkeys(often, 0)
    left, chosen = dict(reached), list[Name]()
    sorts = list(dict.fromkeys(map(sort, reached)))
    for wanted in itertools.islice(itertools.chain(EACH * sorts, itertools.repeat(None)), count):
        names = [name for name in left if wanted is None or sort(name) == wanted]
        if names:
            best = max(names, key=lambda name: sum(worth[element] for element in left[name]))
            for element in left.pop(best):
                had[element] += 1
                worth[element] = worth[element] / 2 if had[element] < TIMES else 0.0
            chosen.append(best)
    return chosen


def draw_kept(kept: Sequence[Kept], seed: int, version: int, versions: tuple[int, ...]) -> tuple[Any, RandomChoices]:
    """The kept configuration of a seed, and the choices of its traffic.

    The first time that seeds go through them, with the versions in turn, traffic is as it was when a configuration was
    chosen; later, and under another version, it is the seed's own.

    Args:
      kept: configurations of the version, one at least.
      seed: of the configuration and the traffic.
      version: of the log format.
      versions: those that seeds have in turn.
    """
    again, place = divmod(seed // len(versions), len(kept))
    header, own = kept[place]
    as_kept = not again and versions[seed % len(versions)] == version
    return header, RandomChoices(own if as_kept else seed)

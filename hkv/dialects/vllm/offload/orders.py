"""A scheduler's step as a second tier sees it, and the tier's orders to its workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Sequence[int]]


@dataclasses.dataclass
class TransferJob:
    """A job as a worker gets it. `sizes` and `starts` are of each group: number of blocks, and the column of the first.

    Attributes:
      job: its number.
      id: the request.
      chunks: chunks, in the order of the keys.
      blocks: blocks, group by group.
      within: whether the step waits for it, of a load.
    """

    job: int
    id: str
    chunks: list[int]
    blocks: list[int]
    sizes: list[int]
    starts: list[int]
    within: bool = False


@dataclasses.dataclass
class Job:
    """A job that goes on: its request, its chunks by their names, whether it stores, and reports that are to come."""

    owner: Any
    keys: list[Any]
    writes: bool
    left: int


@dataclasses.dataclass
class Step:
    """A scheduled step, as far as the tier looks at it.

    Attributes:
      tokens: tokens of each request that is scheduled, in that order.
      tables: of each of them, its blocks or those that are new, group by group, None for none; and whether all.
      finished: requests that finished since the last step, in the order of their names.
      preempted: those that were preempted since.
      targets: blocks that blocks are copied to.
      offers: recurrent states that are handed over: group, block, tokens.
    """

    tokens: Mapping[str, int]
    tables: Sequence[tuple[str, Rows | None, bool]]
    finished: Sequence[str] = ()
    preempted: Sequence[str] = ()
    targets: Sequence[int] = ()
    offers: Mapping[str, Sequence[tuple[int, int, int]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Orders:
    """Orders to the workers of a step: loads, stores, which they begin with the next one, jobs to be finished first."""

    loads: list[TransferJob]
    stores: list[TransferJob]
    flushed: set[int]

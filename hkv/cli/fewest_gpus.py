"""The fewest GPUs that hold so many longest requests at once: `hkv plan --requests N`.

Each number of ranks and stages is planned as one engine; as many engines as are needed serve beside each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hkv.byte_size import show_bytes
from hkv.contract.plan_command import Capacity
from hkv.errors import HKVError, PlanError

RANKS = (1, 2, 4, 8)
"""Tensor-parallel ranks that are tried where none are given: those of one machine."""

STAGES = (1, 2, 4)
"""Pipeline stages that are tried where none are given: more than one where ranks of one machine do not hold it."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Engines beside each other that hold the requests.

    Attributes:
      tp: tensor-parallel ranks of each.
      pp: pipeline stages of each.
      engines: how many.
      capacity: of one engine.
    """

    tp: int
    pp: int
    engines: int
    capacity: Capacity

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.engines

    def record(self) -> dict[str, Any]:
        """The deployment as plain values."""
        fits = {"requests": self.capacity.requests, "weights": self.capacity.weights, "memory": self.capacity.memory}
        return {"gpus": self.gpus, "engines": self.engines, "tp": self.tp, "pp": self.pp, **fits}


def deployments(
    requests: int,
    ranks: Sequence[int],
    stages: Sequence[int],
    capacity: Callable[[int, int], Capacity],
) -> list[Deployment]:
    """Ways to hold so many requests at once, the fewest GPUs first, and then the fewest engines.

    Args:
      requests: of the longest length.
      ranks: numbers of tensor-parallel ranks; none for `RANKS`.
      stages: numbers of pipeline stages; none for one, or the first of `STAGES` that holds a request.
      capacity: plans one engine of so many ranks and stages.

    Raises:
      HKVError: the last refusal, where no number of ranks and stages holds a request.
    """
    refused: HKVError | None = None
    found: list[Deployment] = []
    for pp in stages or STAGES:
        for tp in ranks or RANKS:
            try:
                fits = capacity(tp, pp)
            except HKVError as error:
                refused = error
                continue
            if fits.requests:
                found.append(Deployment(tp, pp, -(-requests // fits.requests), fits))
        if found and not stages:
            break
    if not found:
        raise refused or PlanError("--requests", requests, "a request of that length that fits; none does")
    return sorted(found, key=lambda each: (each.gpus, each.engines, each.pp))


def deployment_lines(found: Sequence[Deployment], requests: int, serve: str) -> Iterator[str]:
    """A table of the deployments, and what the first of them means."""
    yield "GPUs engines tp pp    weights      cache  requests"
    yield "                      a GPU      a GPU an engine"
    for each in found:
        fits = each.capacity
        weights, cache = (show_bytes(size) if size else "-" for size in (fits.weights, fits.memory))
        yield f"{each.gpus:4} {each.engines:7} {each.tp:2} {each.pp:2} {weights:>10} {cache:>10} {fits.requests:9,}"
    best = found[0]
    length = best.capacity.max_model_len
    held = best.engines * best.capacity.requests
    yield f"fewest: {best.gpus} GPUs hold {held:,} requests of {length:,} tokens at once; {requests:,} were asked for"
    if serve:
        yield serve


def values_of(option: Any, given: bool) -> tuple[int, ...]:
    """The values of an option, or none where it was not given."""
    if not given:
        return ()
    return tuple(option) if isinstance(option, tuple) else (option,)

"""Times of arrival where a source gives none, or gives delays between the turns of a session."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from hkv.errors import ConfigError
from hkv.replay.traces.imports.imported import Imported, Remarks

MODELLED = "arrivals made up: sessions come at random, --rate a second on the average"
FOLLOWING = "arrivals made up: a turn comes its delay after the answer before it, --ms-per-token for each of its tokens"
REORDERED = "requests that stood after a later one, put in order of arrival"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """Arrivals of requests whose source does not say when they come.

    Attributes:
      rate: new sessions a second, Poisson (`vllm bench serve --request-rate` by default); None: times are needed.
      seed: of the random gaps.
      ms_per_token: milliseconds that each token of an answer takes, before the next turn of its session.
      pause: milliseconds from an answer to the next turn, where no delay is given.
    """

    rate: float | None = None
    seed: int = 0
    ms_per_token: float = 25.0
    pause: float = 15_000.0


def in_order(requests: Sequence[Imported], pace: Pace, remarks: Remarks) -> list[Imported]:
    """The requests in order of arrival, each with its time; the first comes at 0."""
    source = random.Random(pace.seed)
    clock = 0.0
    answered: dict[str, float] = {}
    for request in requests:
        if request.timestamp is None and request.session in answered:
            delay = pace.pause if request.delay is None else request.delay
            request.timestamp = answered[request.session] + delay
            remarks.note(FOLLOWING)
        elif request.timestamp is None:
            if pace.rate is None:
                raise ConfigError("--rate", None, f"new requests a second: request {request.line} has no time")
            request.timestamp = clock
            clock += 1000 * source.expovariate(pace.rate)
            remarks.note(MODELLED)
        if request.session:
            answered[request.session] = request.timestamp + request.output_length * pace.ms_per_token
    times = [request.timestamp or 0.0 for request in requests]
    late = sum(time < before for before, time in itertools.pairwise(times))
    if late:
        remarks.note(REORDERED, late)
    ordered = sorted(requests, key=lambda request: request.timestamp or 0.0)
    first = min(times, default=0.0)
    for request in ordered:
        request.timestamp = (request.timestamp or 0.0) - first
    return ordered

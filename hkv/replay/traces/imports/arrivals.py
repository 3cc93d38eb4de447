"""Imported requests as a trace of HKV's own: times of arrival, prefixes that are made up, and lines."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hkv.errors import ConfigError
from hkv.replay.traces.imports.imported import Imported, Remarks
from hkv.replay.traces.workloads import PrefixIds

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


MODELS = ("shared-prefix",)
"""`shared-prefix`: every prompt begins with one of so many system prompts, the k-th 1/k as popular as the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The model `shared-prefix`."""

    prefixes: int = 8
    tokens: int = 1024
    seed: int = 0

    def give_ids(self, requests: Sequence[Imported], tokens_per_id: int) -> None:
        """Gives every request ids: those of its system prompt's whole parts, then ids that no other request has."""
        source = random.Random(self.seed)
        weights = [1 / (rank + 1) for rank in range(self.prefixes)]
        shared = self.tokens // tokens_per_id
        fresh = self.prefixes * shared
        for request, prefix in zip(
            requests, source.choices(range(self.prefixes), weights, k=len(requests)), strict=True
        ):
            count = -(-request.input_length // tokens_per_id)
            common = min(shared, request.input_length // tokens_per_id)
            request.ids = [*range(prefix * shared, prefix * shared + common), *range(fresh, fresh + count - common)]
            fresh += count - common


def own_lines(requests: Iterable[Imported], tokens_per_id: int | None, synthetic: str = "") -> Iterator[dict[str, Any]]:
    """One JSON object a request, as `hkv.replay.traces.reader.read_trace` reads it, with the ids' granularity.

    Ids of a source are given anew, 0, 1, 2, ..., by what stands before them: whether they named blocks or whole
    prefixes, equal ones then mean equal prefixes. Where requests have tokens, ids are written in their stead,
    unless `tokens_per_id` is None.
    """
    chains = _Chains()
    prefixes = PrefixIds(tokens_per_id or 1)
    for request in requests:
        line: dict[str, Any] = {"timestamp": _plain(request.timestamp or 0.0)}
        if request.tokens is not None and tokens_per_id is None:
            line["tokens"] = list(request.tokens)
            if request.output_tokens is None:
                line["output_length"] = request.output_length
            else:
                line["output_tokens"] = list(request.output_tokens)
        else:
            ids = None
            if request.tokens is not None:
                ids = prefixes.of(np.asarray(request.tokens, np.uint32))
            elif request.ids is not None:
                ids = chains.of(request.ids)
            line |= {"input_length": request.input_length, "output_length": request.output_length, "hash_ids": ids}
            if ids is not None:
                line["tokens_per_id"] = tokens_per_id
        if synthetic:
            line["synthetic"] = synthetic
        yield line


def _plain(milliseconds: float) -> int | float:
    """Milliseconds, to a thousandth: seconds times 1,000 are not exact."""
    rounded = round(milliseconds, 3)
    return int(rounded) if rounded == int(rounded) else rounded


class _Chains:
    """Ids of prefixes, given in the order in which they are met."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def of(self, blocks: Iterable[int]) -> list[int]:
        parent, ids = -1, []
        for block in blocks:
            parent = self._ids.setdefault((parent, block), len(self._ids))
            ids.append(parent)
        return ids

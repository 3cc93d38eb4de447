"""Replays of dialects that have nothing of their own besides engines: log headers configure, operations name tokens."""

from __future__ import annotations

import abc
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.log import PlainHeader
from hkv.errors import ConfigError
from hkv.model.topology import Group, Topology
from hkv.replay.command import ReplayCommand, StudiedCache, groups_text, schedule_for_groups
from hkv.replay.record import Recorder
from hkv.replay.run import Outcome, Progress, ReplayedCache
from hkv.replay.schedule import Arrival, LiveRequest, Observer, Refusal, Schedule, StepLoop
from hkv.spec import LayerSpec


class PlainLoop(StepLoop):
    """A schedule in which a whole prompt gets its blocks at once, and requests are named by tokens.

    A trace says which prefixes are equal, not what they consist of: the tokens of a block are its prefix key, over and
    over; those after the last key are -1.

    Args:
      engine: an empty engine.
      key_tokens: tokens between two keys.
      schedule: the numbers.
      arrivals: the trace, `step` never falling.
      observer: is told what happens.
    """

    def __init__(
        self, engine: Any, key_tokens: int, schedule: Schedule, arrivals: Iterable[Arrival], observer: Observer
    ) -> None:
        super().__init__(schedule, arrivals, observer)
        self._engine = engine
        self._key_tokens = key_tokens
        self._held: dict[str, int] = {}

    @abc.abstractmethod
    def _enter(self, live: LiveRequest, tokens: list[int]) -> int | None:
        """Asks for the blocks of a request with these tokens; how many of them were cached, None when refused."""

    @abc.abstractmethod
    def _append(self, live: LiveRequest, tokens: list[int]) -> bool:
        """Asks for blocks for more tokens; False when refused."""

    def _admit(self, step: int, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        hit = self._enter(live, self._named(live, 0))
        if hit is None:
            return Refusal.PUT_OFF
        self._held[live.id] = live.tokens
        return hit, min(live.tokens - hit, budget)

    def _grow(self, live: LiveRequest, new: int) -> bool:
        more = self._named(live, self._held[live.id])
        if more and not self._append(live, more):
            return False
        self._held[live.id] = live.tokens
        return True

    def _named(self, live: LiveRequest, first: int) -> list[int]:
        known = min(live.tokens, len(live.keys) * self._key_tokens)
        named = [int(live.keys[place // self._key_tokens]) for place in range(first, known)]
        return named + [-1] * (live.tokens - max(first, known))


class PlainCache(ReplayedCache):
    """A cache whose configuration is a log header, whose engines are the oracle's, and which has no compiled schedule.

    Args:
      header: the header.
      specs: one per group.
      loop: the schedule.
    """

    def __init__(self, header: PlainHeader, specs: Sequence[LayerSpec], loop: Callable[..., StepLoop]) -> None:
        self.config = header
        self._groups = Topology.of_specs(specs).groups
        self._loop = loop

    @property
    def groups(self) -> Sequence[Group]:
        return self._groups

    @property
    def blocks(self) -> int:
        return self.config.num_blocks

    @property
    def key_tokens(self) -> int:
        return math.gcd(*(group.spec.block_size for group in self._groups))

    def engine(self, name: str, make: EngineFactory) -> Any:
        return make(self.config)

    def plain(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: Any, oracle: Any, progress: Progress
    ) -> Outcome:
        recorder = Recorder(self.blocks + 1, None, progress)
        started = time.perf_counter()
        steps = self._loop(driven, self.key_tokens, schedule, coming, recorder).run()
        seconds = time.perf_counter() - started
        return Outcome(self, recorder, steps, getattr(driven, "evictions", None), seconds, schedule.max_model_len)


class PlainReplayCommand(ReplayCommand):
    """Groups over one pool.

    Args:
      loop: the schedule: a `PlainLoop` that was not made yet.
    """

    def __init__(self, loop: Callable[..., StepLoop]) -> None:
        self._loop = loop

    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        name, blocks = options["dialect"], options["num_blocks"]
        if len(blocks) != 1:
            raise ConfigError("num_blocks", list(blocks), f"one number: {name} has one pool")
        groups = [spec.to_log() for spec in options["groups"]]
        header = PlainHeader(dialect=name, feature="replay", num_blocks=blocks[0], groups=groups)
        registry.dialect_of(name).log.check(header)
        cache = PlainCache(header, options["groups"], self._loop)
        return StudiedCache(cache, schedule_for_groups(options), groups_text(options))


# Two replays held against each other: the first place at which they differ.


class Difference(Exception):  # noqa: N818 - the answer of a check, not an error of the input
    """Two engines answered differently.

    Attributes:
      number: operations performed up to and including this one.
      operation: its name.
      request: the request concerned, or "".
      field: field that differs.
      answers: per engine, its name and what it answered.
    """

    def __init__(self, number: int, operation: str, request: str, field: str, answers: dict[str, object]) -> None:
        self.number = number
        self.operation = operation
        self.request = request
        self.field = field
        self.answers = answers
        told = "; ".join(f"{name}: {_shorten(answer)}" for name, answer in answers.items())
        of = f" of request {request}" if request else ""
        super().__init__(f"operation {number}, {operation}{of}: {field} differs: {told}")


def compare_records(mine: Recorder, other: Recorder, names: tuple[str, str]) -> None:
    """Compares every request's fate, what groups lacked for it among that, and every step.

    Raises:
      Difference: names the first one.
    """
    for index in sorted(mine.requests.keys() | other.requests.keys()):
        compare(f"request {index}", mine.requests.get(index), other.requests.get(index), names)
    for field in dataclasses.fields(mine.steps):
        ours, theirs = getattr(mine.steps, field.name), getattr(other.steps, field.name)
        if ours != theirs:
            step = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ours), len(theirs)) if step is None else step
            compare(f"{field.name} of the {at + 1}th step with work", ours[at : at + 1], theirs[at : at + 1], names)


def compare(field: str, mine: object, other: object, names: tuple[str, str]) -> None:
    """Compares two answers.

    Raises:
      Difference: they differ.
    """
    if mine != other:
        raise Difference(0, "replay", "", field, dict(zip(names, (mine, other), strict=True)))


def _shorten(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

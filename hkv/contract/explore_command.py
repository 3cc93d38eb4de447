"""Interface of a dialect to `hkv explore`: its options, and the search that they and the common ones ask for."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import click

from hkv.contract.answer import EngineFactory
from hkv.contract.options import OwnCommand, option
from hkv.errors import ConfigError

Progress = Callable[[str, float], None]
"""Callback for the progress of a search: in words, and as the share of its present part that is done."""

MOST = {"num_blocks": 32, "requests": 4, "max_model_len": 9}
"""The largest space that can be asked for; time and memory end long before."""

TOKENS = (0, 1)
"""The different tokens of prompts and of what is generated."""


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """The shortest way to a broken invariant: no shorter sequence of operations breaks any.

    Attributes:
      invariants: those that the last operation breaks.
      header: the configuration.
      operations: as the log format writes them.
    """

    invariants: tuple[str, ...]
    header: Any
    operations: tuple[Any, ...]


@dataclasses.dataclass
class Report:
    """Result of an exploration.

    Distinct states reached, the empty cache included, and operations performed in them; `depth`: operations of the
    longest shortest way to a state; `evictions`: operations that handed out a cached block; `refusals`: allocations
    that were refused; `exhausted`: every operation was performed in every state that can be reached; `seconds`: from
    the first operation to the end, without `compiling`, which came before that.
    """

    states: int = 1
    transitions: int = 0
    depth: int = 0
    evictions: int = 0
    refusals: int = 0
    by_operation: dict[str, int] = dataclasses.field(default_factory=dict)
    exhausted: bool = False
    seconds: float = 0.0
    compiling: float = 0.0
    counterexample: Counterexample | None = None

    def rate(self, count: int) -> float:
        """A count a second; 0 before the first operation."""
        return count / self.seconds if self.seconds else 0.0

    def share(self, count: int) -> float:
        """A count as a share of all transitions."""
        return count / self.transitions if self.transitions else 0.0

    def record(self, **also: Any) -> dict[str, Any]:
        """The same as plain values, with `also` among them, but for the counterexample."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:-1]},
            **also,
            "states_per_second": self.rate(self.states),
            "share_of_evictions": self.share(self.evictions),
            "share_of_refusals": self.share(self.refusals),
        }

    def lines(self) -> list[str]:
        """The same for people."""
        if not self.seconds:
            return ["nothing explored: stopped while the program was being compiled"]
        compiling = f" after {self.compiling:.1f} s of compiling" if self.compiling else ""
        lines = [
            f"{self.states:,} states, {self.transitions:,} transitions, depth {self.depth}; "
            f"{self.seconds:.1f} s{compiling}: "
            f"{self.rate(self.states):,.0f} states/s, {self.rate(self.transitions):,.0f} transitions/s",
            f"{self.share(self.evictions):.1%} of the transitions evict, {self.share(self.refusals):.1%} refuse; "
            + ", ".join(f"{name} {count:,}" for name, count in self.by_operation.items()),
        ]
        if self.counterexample is None:
            whole = (
                "exhausted: no invariant is broken in any state" if self.exhausted else "not exhausted: stopped early"
            )
            lines.append(whole)
        return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """Traffic that a small cache may see. Lengths are in tokens.

    Attributes:
      requests: most requests at the same time.
      prompt: longest prompt.
      max_model_len: longest request.

    Raises:
      ConfigError: something is too large.
    """

    requests: int = 2
    prompt: int = 2
    max_model_len: int = 2

    def __post_init__(self) -> None:
        for name in ("requests", "max_model_len"):
            check_small(name, getattr(self, name))
        if type(self.prompt) is not int or not 1 <= self.prompt <= self.max_model_len:
            raise ConfigError("prompt", self.prompt, f"1 to max_model_len {self.max_model_len} tokens")

    def names(self) -> Iterator[str]:
        """Names of requests, the first free one being a new request's: names recur, and states with them."""
        return (f"r{number}" for number in range(1, self.requests + 1))

    def prompts(self) -> Iterator[list[int]]:
        """Every prompt: all strings of `TOKENS` up to the longest."""
        lengths = range(1, self.prompt + 1)
        return (list(tokens) for length in lengths for tokens in itertools.product(TOKENS, repeat=length))


def check_small(name: str, value: object) -> None:
    """Raises ConfigError unless a size of a space is one of those that `MOST` allows."""
    if type(value) is not int or not 1 <= value <= MOST[name]:
        raise ConfigError(name, value, f"1 to {MOST[name]}, so that there is an end")


class World(Protocol):
    """A cache at one point of an exploration, with all that its invariants remember.

    Attributes:
      evictions: blocks that were evicted so far.
    """

    @property
    def evictions(self) -> int: ...

    def perform(self, operation: Any) -> Any:
        """Performs one operation, asks every invariant, and returns the engine's answer.

        Raises:
          InvariantError: one does not hold after it.
          Exception: whatever the engine raises.
        """

    def refused(self, answer: Any) -> bool:
        """True if an answer refuses blocks."""
        ...

    def operations(self) -> Iterator[Any]:
        """The operations that may come next."""
        ...

    def name(self) -> Hashable:
        """Canonical state: equal for two worlds that differ in nothing that a rule or an invariant can read."""

    def copies(self) -> Callable[[], World]:
        """Makes, whenever it is called, a world like this one is now."""
        ...


class Search(abc.ABC):
    """A search through the states that a small cache can reach; `report` is the result so far.

    `more` are settings that plain values of the result have besides it.
    """

    report: Report
    more: Mapping[str, Any] = MappingProxyType({})

    @abc.abstractmethod
    def run(self, progress: Progress) -> None:
        """Searches until all is explored, something is broken, or a limit is reached; may be interrupted."""

    @abc.abstractmethod
    def explored(self) -> AbstractContextManager[tuple[str, EngineFactory]]:
        """The cache that is searched as an engine: a name and a factory, which has its defects inside the context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The size of a space, which every dialect's command has."""

    num_blocks: int = option(
        5, type=click.IntRange(2, MOST["num_blocks"]), help="Blocks of each pool, the null block included."
    )
    requests: int = option(2, type=click.IntRange(1, MOST["requests"]), help="Requests at the same time.")
    max_model_len: int = option(3, type=click.IntRange(1, MOST["max_model_len"]), help="Tokens of the longest request.")
    prompt: int | None = option(
        type=click.IntRange(1, MOST["max_model_len"]),
        help="Tokens of the longest prompt.  [default: the longest request]",
    )


class ExploreCommand(OwnCommand):
    """`hkv explore` under one dialect's rules."""

    declared = SizeOptions

    def search(self, options: dict[str, Any]) -> Search | None:
        """The search that the command's options ask for; HKVError where there is no such cache, or it is too large."""
        return None

    def world(self, options: dict[str, Any]) -> tuple[Any, World]:
        """The header, and the empty cache, that the command's options ask for.

        Raises:
          HKVError: there is no such cache, or it is too large.
        """
        raise NotImplementedError


def space_of(options: dict[str, Any]) -> Space:
    """The traffic that `SizeOptions` ask for."""
    longest, prompt = options["max_model_len"], options["prompt"]
    return Space(requests=options["requests"], prompt=longest if prompt is None else prompt, max_model_len=longest)

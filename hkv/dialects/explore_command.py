"""Interface of a dialect to `hkv explore`: its options, and the search that they and the common ones ask for."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import click

Progress = Callable[[str, float], None]
"""Callback for the progress of a search: in words, and as the share of its present part that is done."""


class Counterexample(Protocol):
    """A shortest sequence of operations that breaks an invariant.

    Attributes:
      invariants: names of those that it breaks.
      header: the configuration.
      operations: the operations.
    """

    @property
    def invariants(self) -> Sequence[str]: ...

    @property
    def header(self) -> Any: ...

    @property
    def operations(self) -> Sequence[Any]: ...

    def with_answers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Operations of a log of it, and the reference's answers to them."""
        ...


@dataclasses.dataclass(frozen=True)
class Exploration:
    """Coverage and result of a search so far.

    Attributes:
      lines: its coverage, for people.
      record: the same as plain values.
      counterexample: the broken invariant; None where nothing is broken.
    """

    lines: Sequence[str]
    record: dict[str, Any]
    counterexample: Counterexample | None


class Search(abc.ABC):
    """A search through the states that a small cache can reach."""

    @abc.abstractmethod
    def run(self, progress: Progress) -> None:
        """Searches until all is explored, something is broken, or a limit is reached; may be interrupted."""

    @abc.abstractmethod
    def found(self) -> Exploration:
        """Coverage and result so far."""


class ExploreCommand(abc.ABC):
    """`hkv explore` under one dialect's rules."""

    def options(self) -> Sequence[click.Option]:
        """Options that only some dialects have, this one among them. Their defaults stand for not being given."""
        return ()

    @abc.abstractmethod
    def search(self, options: dict[str, Any]) -> Search:
        """The search that the command's options ask for.

        Raises:
          HKVError: there is no such cache, or it is too large.
        """

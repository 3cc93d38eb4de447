"""What a dialect gives `hkv explore`: its options, and the search that they and the common ones ask for."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import click

Progress = Callable[[str, float], None]
"""Told how far a search is, in words, and what share of its present part is done."""


@dataclasses.dataclass(frozen=True)
class Exploration:
    """What a search found so far.

    Attributes:
      lines: what it covered and found, for people, the counterexample's operations left out.
      record: the same as plain values, without the counterexample.
      broken: names of the invariants that the counterexample breaks; empty where there is none.
      header: the configuration.
      operations: of the counterexample.
      answers: the reference's.
    """

    lines: Sequence[str]
    record: dict[str, Any]
    broken: tuple[str, ...] = ()
    header: Any = None
    operations: Sequence[Any] = ()
    answers: Sequence[Any] = ()


class Search(abc.ABC):
    """A search through the states that a small cache can reach."""

    @abc.abstractmethod
    def run(self, progress: Progress) -> None:
        """Searches until all is explored, something is broken, or a limit is reached; may be interrupted."""

    @abc.abstractmethod
    def found(self) -> Exploration:
        """What was found so far."""


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

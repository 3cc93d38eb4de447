"""Observation of live caches: observers, sinks of their operations, and their places in a process."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from hkv.contract.log import LARGEST
from hkv.errors import HKVError


class Observed(Protocol):
    """A live cache under observation."""

    def close(self) -> None:
        """Says its last state and ends the observation; the cache goes on."""


class Sink(Protocol):
    """Takes what a live cache was asked and answered."""

    def calls_to(self, perform: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function that takes a call, in the cache's own thread; `perform` says its operations to this sink, in
        order, now or later.
        """
        ...

    def step_ends(self) -> None:
        """The cache is done with a step; the model runs now."""

    def begin(self, header: Any) -> None:
        """The configuration; comes first, and once."""

    def operation(self, operation: Any, answer: Any) -> None:
        """An operation that the cache performed, and its answer, None for none."""

    def close(self) -> None:
        """No call follows."""


class Judge(Protocol):
    """Holds what a live process does, call by call, to what HKV says of it; the first difference is reported."""

    def judge(self, call: str, arguments: Mapping[str, Any], want: Any, got: Any) -> None:
        """Compares two answers."""

    def record(self, line: Any) -> None:
        """Writes down what was seen, as a line of JSON."""

    def hook(self, observe: Callable[[Any], Callable[[], None]]) -> None:
        """Has something observed, for as long as the session lasts: it takes this judge, and returns what ends it."""


class Session(Protocol):
    """All live caches that one process observes.

    Attributes:
      states: the states that are told: `none`, `end`, `digest`, `step` or `all`.
      share: of the caches, those that are observed.
      tensors: records of a worker's tensors: `none`, those of the `start`, or the tables of each `step` as well.
    """

    states: str
    share: float
    tensors: str

    def judge(self, subject: str) -> Judge:
        """Judge of live calls about a subject, which its files are named after."""
        ...

    def draws(self) -> bool:
        """True if the next cache is one of those."""
        ...

    def sink(self, dialect: Any) -> Sink:
        """Sink for the operations of the next cache."""
        ...

    def observe(self, observed: Observed) -> None:
        """Remembers a cache under observation, to close it at the end."""

    def refuse(self, what: str, reason: str) -> None:
        """Notes a cache that cannot be observed, and why."""


def observe_share(session: Session, name: str, attach: Callable[[], Any], made_of: str = "") -> None:
    """Has a cache observed that is being made, if it is one of the share; else the session notes why it is not.

    Args:
      session: the session.
      name: name of the cache.
      attach: begins to observe it.
      made_of: what it is noted as where it cannot be observed; its name for "".
    """
    if _BESIDE.get():
        return
    if not session.draws():
        session.refuse(name, f"not drawn: share is {session.share:g}")
        return
    try:
        attach()
    except HKVError as error:
        session.refuse(made_of or name, str(error))


_BESIDE = contextvars.ContextVar("beside", default=False)


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """While an engine is made or asked that runs beside a live one: the caches that it makes itself are no live ones,
    and `observe_share` passes them by."""
    token = _BESIDE.set(True)
    try:
        yield
    finally:
        _BESIDE.reset(token)


def fits_a_log(tokens: list[int]) -> bool:
    """True if token ids fit the integers of a log."""
    return not tokens or (min(tokens) >= -LARGEST - 1 and max(tokens) <= LARGEST)

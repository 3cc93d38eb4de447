"""Moves of random traffic, one by one, for state machines."""

from __future__ import annotations

import functools
import pathlib

import msgspec

from hkv.contract.traffic import Kept
from hkv.dialects.vllm.log import structs
from hkv.dialects.vllm.log.structs import Header
from hkv.dialects.vllm.traffic.headers import with_later_keys
from hkv.dialects.vllm.traffic.traffic import Traffic

ABOUT_RUNNING = ("go_on", "finish", "preempt")
"""Moves that want a request which runs."""


class TrafficMoves(Traffic):
    """Traffic of which each move can be made by itself; see `hkv.contract.traffic.Moves`."""

    def possible(self, move: str) -> bool:
        """True if there is a request that the move can be about."""
        return self.waits if move == "admit" else self.runs if move in ABOUT_RUNNING else True

    def make(self, move: str) -> None:
        """Makes a move."""
        getattr(self, move)()

    @property
    def waits(self) -> bool:
        """True if a request waits."""
        return bool(self._waiting)

    @property
    def runs(self) -> bool:
        """True if a request runs."""
        return bool(self._running)

    def arrive(self) -> None:
        """A request arrives; now and then with the prompt of an earlier one."""
        self._arrive()

    def admit(self) -> None:
        """A waiting request is looked up and allocated, or refused."""
        self._admit(self._choices.pick(self._waiting))

    def go_on(self) -> None:
        """A running request computes on, finishes, or is preempted for another."""
        self._continue(self._choices.pick(self._running))

    def finish(self) -> None:
        """A running request ends."""
        self._finish(self._choices.pick(self._running))

    def preempt(self) -> None:
        """A running request gives back all it has."""
        self._preempt(self._choices.pick(self._running))

    def evict(self) -> None:
        """Some blocks lose their keys."""
        self._evict()

    def next_step(self) -> None:
        """Reads the events and the state, and begins a new scheduling step."""
        if self._copying:
            self._perform(structs.CopiesOp())
        for operation in (structs.EventsOp(), structs.StateOp(), structs.StepOp()):
            self._perform(operation)

    def reset(self) -> None:
        """The prefix cache is reset; refused while a block is in use."""
        self._perform(structs.ResetOp())


# Configurations under which seeds reached branches of the reference that others seldom do, as they are kept.


PLACE = pathlib.Path(__file__).with_name("kept.jsonl")
"""The file."""


class _Line(msgspec.Struct):
    seed: int
    header: Header


@functools.cache
def kept(version: int) -> tuple[Kept, ...]:
    """Kept configurations of a version of the log.

    Versions 3 and 4 have those of 2 and 1 too, the second half of them first: seeds of all versions in turn then go
    through everything that is kept.
    """
    lines = [msgspec.json.decode(line, type=_Line) for line in PLACE.read_bytes().splitlines()]
    known = version if version < 3 else 5 - version
    every = [Kept(_of_version(line.header, version), line.seed) for line in lines if line.header.oplog == known]
    half = len(every) // 2 if version > 2 else 0
    return (*every[half:], *every[:half])


def written(every: list[Kept]) -> bytes:
    """The file of these configurations."""
    return b"".join(msgspec.json.encode(_Line(seed, header)) + b"\n" for header, seed in every)


def _of_version(header: Header, version: int) -> Header:
    bugs = list(header.bugs)
    if version > 2 and header.partial_hits and "copied-before-written" not in bugs:
        bugs.append("copied-before-written")  # a load may begin inside a block that another request fills
    bugs = with_later_keys(header, bugs) if version > 1 else bugs
    return msgspec.structs.replace(header, oplog=version, bugs=bugs)

"""Random traffic of the second tier: offers, loads and ends of requests whose jobs come back late, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle

POOL_FEATURES = ("lru", "arc", "threshold")
"""Features of logs of a pool by itself: its policies, and offers that are counted."""

MOST_RUNNING = 4


def draw_header(choices: Choices, feature: str, name: str) -> structs.Header:
    """A configuration whose tier is soon full."""
    groups = choices.integer(1, 3)
    counted = feature == "threshold"
    return structs.Header(
        dialect=name,
        feature=feature,
        num_blocks=[choices.integer(3, 16)],
        groups=[{"kind": "full_attention", "block_size": 1}] * groups,
        policy=feature if feature in structs.POLICIES else choices.pick(structs.POLICIES),
        threshold=choices.integer(2, 3) if counted else choices.integer(0, 1),
        tracked=choices.pick((2, 5, 10, 64_000)) if counted else 64_000,
    )


def drive(header: structs.Header, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
    """Performs random traffic: every operation is legal, and answers decide what comes next.

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
      steps: rounds of some moves; each ends with `state`.
    """
    traffic = PoolTraffic(header, choices, perform)
    for _ in range(steps):
        for _ in range(choices.integer(3, 8)):
            move = choices.pick(("begin", "store", "store", "store", "load", "load", "done", "done", "end", "events"))
            move = "clear" if choices.chance(1) else move
            if traffic.possible(move):
                traffic.make(move)
        traffic.make("state")


class PoolTraffic:
    """Requests that walk along prompts which share their heads, move by move (`hkv.contract.traffic.Moves`).

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
    """

    def __init__(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any]) -> None:
        self._header, self._choices, self._perform = header, choices, perform
        self._lifecycle = PoolLifecycle()
        self._prompts: dict[str, list[str]] = {}
        self._begun = self._jobs = 0

    def possible(self, move: str) -> bool:
        """True if the move has something to be about."""
        lifecycle = self._lifecycle
        if move in ("begin", "clear", "events", "state"):
            return move != "begin" or len(lifecycle.requests) < MOST_RUNNING
        return bool(lifecycle.jobs if move == "done" else lifecycle.requests)

    def make(self, move: str) -> None:
        """Makes a move; a load of which no chunk is there is left out."""
        choices = self._choices
        match move:
            case "begin":
                self._begun += 1
                id = f"r{self._begun}"
                shared = choices.integer(0, 3)
                self._prompts[id] = [f"{chr(97 + choices.integer(0, 2) * (at >= shared))}{at:02d}" for at in range(8)]
                self._ask(structs.BeginOp(id=id))
            case "store":
                self._transfer(structs.StoreOp, lambda key: True)
            case "load":
                self._transfer(structs.LoadOp, self._lifecycle.ready.__contains__)
            case "done":
                job = choices.pick(sorted(self._lifecycle.jobs))
                failed = self._lifecycle.jobs[job][0] and choices.chance(15)
                self._ask(structs.DoneOp(job=job, failed=failed))
            case "end":
                self._ask(structs.EndOp(id=self._request()))
            case "clear":
                self._ask(structs.ClearOp())
            case "events":
                self._ask(structs.EventsOp())
            case _:
                self._ask(structs.StateOp())

    def _request(self) -> str:
        return self._choices.pick(sorted(self._lifecycle.requests))

    def _transfer(self, kind: type[structs.StoreOp | structs.LoadOp], wanted: Callable[[structs.Key], bool]) -> None:
        """A transfer of a stretch of a request's prompt, in some of the groups."""
        choices, id = self._choices, self._request()
        first = choices.integer(0, 7)
        last = choices.integer(first, min(7, first + 4))
        groups = [group for group in range(len(self._header.groups)) if choices.chance(70)] or [0]
        keys = [(self._prompts[id][place], group, place + 1) for group in groups for place in range(first, last + 1)]
        keys = [key for key in keys if wanted(key[:2])]
        if keys:
            self._jobs += 1
            self._ask(kind(id=id, job=self._jobs, keys=keys))

    def _ask(self, operation: Any) -> None:
        self._lifecycle.follow(operation)
        self._lifecycle.answered(operation, self._perform(operation))

"""Random traffic of the second tier: offers, loads and ends of requests whose jobs come back late, or fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import BUGS, POLICIES, SIMPLE
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle, SchedulerLifecycle
from hkv.spec import KINDS

POOL_FEATURES = ("lru", "arc", "threshold")
"""Features of logs of a pool by itself: its policies, and offers that are counted."""

MOST_RUNNING = 4


OF_SIMPLE = ("simple", "lazy", "simple_tails")
"""Features of logs of a scheduler with the simpler connector: itself, its lazy mode, its tails inside blocks."""

SCHEDULER_FEATURES = (
    *("full", "window", "groups", "decode", "crowded", "states", "drafts", "eagle", "tails"),
    *OF_SIMPLE,
)
"""Features of logs of a scheduler: one group, with windows, of several block sizes, outputs stored, little memory,
recurrent states, groups of a draft's layers, drafts that are checked, tails inside blocks next to recurrent states."""

TAILED = ("tails", "simple_tails")
"""Features with tails inside blocks."""

RECURRENT = ("states", *TAILED)
"""Features of which the second group holds states."""

MOST_REQUESTS = 5

MEMORY = 8
"""Earlier texts that a new prompt may continue."""


def draw_header(choices: Choices, feature: str, name: str) -> structs.Header:
    """A configuration whose tier is soon full."""
    return draw_pool(choices, feature, name) if name == structs.CHUNKS else draw_scheduler(choices, feature, name)


def draw_scheduler(choices: Choices, feature: str, name: str) -> structs.Header:
    """A scheduler with small blocks, and little of them."""
    tails, simple = feature in TAILED, feature in OF_SIMPLE
    size, per_chunk = choices.pick((4, 8) if tails else (2, 4, 4)), choices.pick((1, 1, 1, 2) if tails else (1, 1, 2))
    drafted = {"eagle": 100, "tails": 40}.get(feature, 25 * simple)
    drafts = choices.integer(1, 3) if choices.chance(drafted) else 0
    plain = {"connector": SIMPLE, "policy": "lru", "threshold": 0, "prompt_only": False, "sync_tokens": 0}
    plain["lazy"] = feature == "lazy" or (feature == "simple_tails" and choices.chance(30))
    per_chunk = 1 if simple else per_chunk
    count = 1 if feature == "full" else choices.integer(1 + (feature in ("drafts", *RECURRENT)), 3)
    groups = [_group(choices, feature, size, place, drafts) for place in range(count)]
    if feature == "simple_tails" and not any("chunk" in group for group in groups) and choices.chance(30):
        groups = [{**group, "block_size": size << KINDS[group["kind"]].snapshot} for group in groups]
    chunk = math.lcm(*(group["block_size"] for group in groups)) * per_chunk
    crowded, attends = feature == "crowded", any(not KINDS[group["kind"]].snapshot for group in groups)
    sparse = any(KINDS[group["kind"]].slides or KINDS[group["kind"]].snapshot for group in groups)
    header = structs.Header(
        dialect=name,
        feature=feature,
        num_blocks=[
            choices.integer(18, 30) if crowded else choices.integer(25, 80),
            choices.integer(*((12, 60) if tails else (4, 40))),
        ],
        groups=groups,
        policy=choices.pick(POLICIES),
        threshold=choices.pick((0, 0, 0, 2)),
        tracked=choices.pick((5, 64_000)),
        blocks_per_chunk=per_chunk,
        prompt_only=not (feature == "decode" or choices.chance(20)),
        workers=choices.pick((1, 1, 2)),
        sync_tokens=choices.pick((0, 0, 8, 24)) if attends else 0,
        step_tokens=choices.pick((8, 16, 32)),
        most_running=choices.pick((2, 4)),
        max_model_len=64,
        eagle=[place for place in range(count) if choices.chance(60)] if drafts or feature == "drafts" else [],
        drafts=drafts,
        hash_block_size=size // choices.pick((1, 2, 2, 4)) if tails else None,
        retention_interval=choices.pick((0, None, None, chunk, 2 * chunk)) if sparse else 0,
        bugs=sorted(BUGS),
    )
    if not simple:
        return header
    # A small GPU before a large tier: nothing empties the GPU while a store goes on.
    sizes = [choices.integer(20, 36), choices.integer(20, 90)]
    return msgspec.structs.replace(header, num_blocks=sizes, **plain)


def _group(choices: Choices, feature: str, size: int, place: int, drafts: int) -> dict[str, Any]:
    """One group; the first one is mostly of full attention."""
    if feature == "groups":
        size = choices.pick((2, 4, 8))
    states = 100 if place == 1 else 20
    if feature in OF_SIMPLE and place == 0:
        return {"kind": choices.pick(("full_attention", "mla")), "block_size": size}
    if choices.chance(states if feature in RECURRENT else 15 * (feature in ("eagle", "simple", "lazy"))):
        return {"kind": "mamba", "block_size": size, "num_speculative_blocks": drafts}
    if feature == "full" or choices.chance(75 if place == 0 else 90 if feature in TAILED else 25):
        return {"kind": choices.pick(("full_attention", "full_attention", "mla")), "block_size": size}
    if feature != "groups" and not drafts and choices.chance(15):  # a chunked group's block is the scheduler's
        return {"kind": "chunked_local", "block_size": size, "chunk": choices.pick((4, 8, 12))}
    return {"kind": "sliding_window", "block_size": size, "window": choices.pick((2, 3, 4, 5, 8, 9, 13, 17))}


def draw_pool(choices: Choices, feature: str, name: str) -> structs.Header:
    """A pool by itself."""
    groups = choices.integer(1, 3)
    counted = feature == "threshold"
    return structs.Header(
        dialect=name,
        feature=feature,
        num_blocks=[choices.integer(3, 16)],
        groups=[{"kind": "full_attention", "block_size": 1}] * groups,
        policy=feature if feature in POLICIES else choices.pick(POLICIES),
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
    if header.dialect == structs.OFFLOAD:
        drive_scheduler(header, choices, perform, steps)
        return
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


def drive_scheduler(header: structs.Header, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
    """Performs random traffic of a scheduler: requests come, steps follow, now and then something is taken back."""
    traffic = StepTraffic(header, choices, perform)
    returns = 25 if header.feature == "tails" else 8  # the GPU's own cache has most tails as long as it has anything
    for _ in range(2 * steps):
        while choices.chance(35) and traffic.possible("request"):
            traffic.make("request")
        for move, percent in (("abort", 4), ("reset", 6), ("return", returns)):
            if choices.chance(percent) and traffic.possible(move):
                traffic.make(move)
        traffic.make("step")
        if choices.chance(60):
            traffic.make("state")


class StepTraffic:
    """Requests that begin as earlier ones did, and jobs that are reported late and out of order.

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
    """

    def __init__(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any]) -> None:
        self._header, self._choices, self._perform = header, choices, perform
        self._lifecycle = SchedulerLifecycle(header)
        self._texts: list[list[int]] = [[]]
        self._arrived = 0
        self._prompt = choices.integer(30, 85)
        self._tails = structs.to_config(header).tails

    def possible(self, move: str) -> bool:
        """True if the move has something to be about."""
        if move == "request":
            return len(self._lifecycle.requests) < MOST_REQUESTS
        return move != "abort" or bool(self._lifecycle.requests)

    def make(self, move: str) -> None:
        """Makes a move."""
        choices = self._choices
        match move:
            case "request":
                self._ask(self._request())
            case "abort":
                self._ask(structs.AbortOp(id=choices.pick(sorted(self._lifecycle.requests))))
            case "reset":
                preempt = self._empties() and choices.chance(50)
                # What a window's running request is after that, vLLM seldom survives (`reset-revives-window-blocks`).
                windows = any("window" in group for group in self._header.groups)
                tier = choices.chance(60) and not (windows and self._lifecycle.requests)
                self._ask(structs.ResetOp(preempt=preempt, tier=tier))
            case "return":  # what ran before is wanted again, and the GPU has lost it
                self._ask(structs.ResetOp(preempt=self._empties()))
                while self.possible("request") and choices.chance(70):
                    self._ask(self._repeated())
            case "state":
                self._ask(structs.StateOp())
            case _:
                jobs = self._lifecycle.jobs
                reports = [job for job in sorted(jobs) for _ in range(jobs[job]) if choices.chance(self._prompt)]
                if choices.chance(50):
                    reports.reverse()
                self._ask(structs.StepOp(reports=reports, at_once=choices.chance(30)))

    def _empties(self) -> bool:
        """True if a reset that preempts empties the GPU: nothing is loaded, and no store of the simpler tier holds
        blocks, which may also wait for their step."""
        return not self._lifecycle.loading and self._header.connector != SIMPLE

    def _repeated(self) -> structs.RequestOp:
        """A request that is an earlier one once more."""
        self._arrived += 1
        text = self._choices.pick(self._texts)[: self._header.max_model_len - 2] or [0]
        return structs.RequestOp(id=f"r{self._arrived}", tokens=text, output=self._choices.integer(1, 4))

    def _request(self) -> structs.RequestOp:
        """A request that often begins as an earlier one did, or goes on where its output ended."""
        choices = self._choices
        self._arrived += 1
        known = choices.pick(self._texts)
        most = self._header.max_model_len - 2
        size = self._header.groups[0]["block_size"]
        text = known[: choices.pick((len(known), choices.integer(0, len(known)), len(known) // size * size))]
        text = (text + [choices.integer(0, 2) for _ in range(choices.integer(0, 5 * size))])[:most] or [0]
        output = choices.integer(1, 8)
        told = text + [(len(text) + more) % 5 for more in range(output)]
        self._texts = [*self._texts, told if choices.chance(30) else text][-MEMORY:]
        limits = [choices.integer(0, 24) if choices.chance(8) else None for _ in range(2)]
        if self._tails:  # what a tail beyond the limit does to vLLM, it does not survive
            limits[1] = None
        return structs.RequestOp(
            id=f"r{self._arrived}", tokens=text, output=output, load_limit=limits[0], store_limit=limits[1]
        )

    def _ask(self, operation: Any) -> None:
        self._lifecycle.follow(operation)
        self._lifecycle.answered(operation, self._perform(operation))

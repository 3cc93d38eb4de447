"""Generates workloads whose requests share prefixes as chats, templates and agents do."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hkv.errors import ConfigError
from hkv.replay.traces.reader import Texts

MAX_LENGTH = 1 << 20
"""Most tokens a mean length may have."""

TOKENS_PER_SECOND = 40
"""Tokens of an answer that are written per second."""

SPREAD = 0.5
"""Lengths are log-normal; this is the standard deviation of their logarithm."""


def _check(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(name, value, f"an integer from {least} to {most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters of a workload. Lengths are means, in tokens; single ones vary around them.

    Attributes:
      requests: requests to generate.
      rate: new sessions a second; a session is a chat, a single request, or an agent's task.
      prefixes: different system prompts; the k-th is 1/k as popular as the first.
      prefix_tokens: tokens of a system prompt.
      prompt_tokens: tokens of what a user says, or a tool returns.
      output_tokens: tokens of an answer.
      turns: requests of a chat or a task.
      pause: seconds between an answer and the next request of its session.
      branch_percent: percentage of an agent's requests that start two more agents on the same context.
      max_tokens: most tokens of prompt and output together: longer answers are cut, longer prompts end a session.
    """

    requests: int = 1000
    rate: float = 1.0
    prefixes: int = 8
    prefix_tokens: int = 1024
    prompt_tokens: int = 256
    output_tokens: int = 256
    turns: float = 6.0
    pause: float = 15.0
    branch_percent: int = 10
    max_tokens: int = 1 << 17

    def __post_init__(self) -> None:
        _check("requests", self.requests, 1, 10**9)
        _check("prefixes", self.prefixes, 1, 10**6)
        _check("max_tokens", self.max_tokens, 2, 2**31 - 1)
        _check("prefix_tokens", self.prefix_tokens, 0, MAX_LENGTH)
        for name in ("prompt_tokens", "output_tokens"):
            _check(name, getattr(self, name), 1, MAX_LENGTH)
        _check("branch_percent", self.branch_percent, 0, 100)
        for name, least in (("rate", 1e-6), ("turns", 1.0), ("pause", 0.0)):
            value = getattr(self, name)
            if not least <= value <= 1e9:
                raise ConfigError(name, value, f"a number from {least:g} to 1e9")


@dataclasses.dataclass(frozen=True)
class GeneratedRequest:
    """One request: arrival in whole milliseconds, its prompt and what it generates as uint32 arrays."""

    timestamp: int
    tokens: np.ndarray
    output: np.ndarray


@dataclasses.dataclass(order=True)
class _Session:
    """A chat, a single request or an agent's task: sends `context` at `time` (seconds) and `left` requests after it."""

    time: float
    number: int
    context: np.ndarray = dataclasses.field(compare=False)
    left: int = dataclasses.field(compare=False)


class _Generator:
    """Sessions open at random times; each sends a request, hears the answer, and its kind says how it goes on."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self._random = random.Random(seed)
        self._texts = Texts(seed)
        self._sessions: list[_Session] = []
        self._number = 0
        self._prefixes = [self._text(workload.prefix_tokens) for _ in range(workload.prefixes)]
        self._popularity = [1 / (k + 1) for k in range(workload.prefixes)]

    def run(self, follow: Follow) -> Iterator[GeneratedRequest]:
        """Yields the workload's requests; `follow` is told of each and may plan further ones."""
        opening, sent = 0.0, 0
        while sent < self.workload.requests:
            if not self._sessions or opening <= self._sessions[0].time:
                [prefix] = self._random.choices(self._prefixes, self._popularity)
                self.plan(opening, self.say(prefix)[: self.workload.max_tokens - 1], self._turns() - 1)
                opening += self._wait(1 / self.workload.rate)
                continue
            session = heapq.heappop(self._sessions)
            answer = self._text(self.workload.output_tokens)[: self.workload.max_tokens - len(session.context)]
            yield GeneratedRequest(round(session.time * 1000), session.context, answer)
            sent += 1
            follow(self, session, answer)

    def plan(self, time: float, context: np.ndarray, left: int) -> None:
        """A session will send `context`, unless it has grown too long."""
        if len(context) < self.workload.max_tokens:
            heapq.heappush(self._sessions, _Session(time, self._number, context, left))
            self._number += 1

    def go_on(self, session: _Session, answer: np.ndarray, left: int) -> None:
        """The answer is written, someone reads it, and the session's next request carries all that was said."""
        if left >= 0:
            time = session.time + len(answer) / TOKENS_PER_SECOND + self._wait(self.workload.pause)
            self.plan(time, self.say(np.concatenate([session.context, answer])), left)

    def say(self, context: np.ndarray) -> np.ndarray:
        """The context with something new at its end: a question, or a tool's result."""
        return np.concatenate([context, self._text(self.workload.prompt_tokens)])

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases."""
        return self._random.randrange(100) < percent

    def _text(self, mean: int) -> np.ndarray:
        """New tokens, log-normally many."""
        return self._texts.new(
            max(1, round(mean * self._random.lognormvariate(-(SPREAD**2) / 2, SPREAD))) if mean else 0
        )

    def _wait(self, mean: float) -> float:
        return self._random.expovariate(1 / mean) if mean else 0.0

    def _turns(self) -> int:
        """Requests of a session: geometric."""
        more = 1 - 1 / self.workload.turns
        return 1 + (int(math.log(1 - self._random.random()) / math.log(more)) if more else 0)


Follow = Callable[[_Generator, _Session, np.ndarray], None]


def _follow_chat(generator: _Generator, session: _Session, answer: np.ndarray) -> None:
    """The user reads the answer and writes again."""
    generator.go_on(session, answer, session.left - 1)


def _follow_single(generator: _Generator, session: _Session, answer: np.ndarray) -> None:
    """One request, one answer."""


def _follow_agent(generator: _Generator, session: _Session, answer: np.ndarray) -> None:
    """A tool's result comes back; now and then two more agents set out from the same context, for half the way."""
    generator.go_on(session, answer, session.left - 1)
    if session.left > 1 and generator.chance(generator.workload.branch_percent):
        for _ in range(2):
            generator.go_on(session, answer, session.left // 2 - 1)


_FOLLOW: dict[str, Follow] = {"chat": _follow_chat, "shared-prefix": _follow_single, "agentic": _follow_agent}

DEFAULTS = {
    "chat": Workload(),
    "shared-prefix": Workload(rate=4.0, prefix_tokens=2048, turns=1.0),
    "agentic": Workload(
        rate=0.1, prefixes=3, prefix_tokens=4096, prompt_tokens=1024, output_tokens=128, turns=20.0, pause=2.0
    ),
}
"""Per kind of workload, what is usual."""


def generate(kind: str, workload: Workload, seed: int) -> Iterator[GeneratedRequest]:
    """The requests of a workload in order of arrival; the same for the same arguments.

    Args:
      kind: `chat`: sessions of many turns; `shared-prefix`: single requests that share system prompts; `agentic`:
        contexts that grow by tool calls and branch.
      workload: parameters of the workload.
      seed: of the generator, at least 0.

    Raises:
      ConfigError: no such kind, a negative seed.
    """
    if kind not in _FOLLOW:
        raise ConfigError("workload", kind, f"one of {', '.join(_FOLLOW)}")
    _check("seed", seed, 0, 2**31 - 1)
    return _Generator(workload, seed).run(_FOLLOW[kind])


# Writes generated requests as trace lines.

FORMATS = ("mooncake", "tokens")


def trace_lines(requests: Iterable[GeneratedRequest], format: str, tokens_per_id: int) -> Iterator[dict[str, Any]]:
    """One JSON object a request, as `hkv.replay.traces.reader.read_trace` reads it.

    `mooncake`: lengths and one id for every `tokens_per_id` prompt tokens, the last one for what is left; `tokens`: all
    tokens, generated ones too.
    """
    if format not in FORMATS:
        raise ConfigError("format", format, f"one of {', '.join(FORMATS)}")
    ids = PrefixIds(tokens_per_id)
    for request in requests:
        if format == "tokens":
            rest: dict[str, Any] = {"tokens": request.tokens.tolist(), "output_tokens": request.output.tolist()}
        else:
            lengths = {"input_length": len(request.tokens), "output_length": len(request.output)}
            rest = {**lengths, "hash_ids": ids.of(request.tokens), "tokens_per_id": tokens_per_id}
        yield {"timestamp": request.timestamp, **rest}


class PrefixIds:
    """Equal ids, equal blocks and equal prefixes; ids are 0, 1, 2, ... in the order in which they are met."""

    def __init__(self, tokens_per_id: int) -> None:
        self._size = 4 * tokens_per_id
        self._ids: dict[tuple[int, bytes], int] = {}

    def of(self, tokens: np.ndarray) -> list[int]:
        data = tokens.astype("<u4").tobytes()
        ids: list[int] = []
        for start in range(0, len(data), self._size):
            block = (ids[-1] if ids else -1, data[start : start + self._size])
            ids.append(self._ids.setdefault(block, len(self._ids)))
        return ids

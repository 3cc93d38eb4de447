"""Generates workloads whose requests share prefixes as chats, templates and agents do."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
import numpy as np

from hkv.contract.options import COUNT, Number, option, parameters
from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.replay.traces.reader import NewRequest, own_lines

MAX_LENGTH = 1 << 20
"""Most tokens a mean length may have."""

TOKENS_PER_SECOND = 40
"""Tokens of an answer that are written per second."""

SPREAD = 0.5
"""Lengths are log-normal; this is the standard deviation of their logarithm."""


LENGTH = click.IntRange(1, MAX_LENGTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters of a workload. Lengths are means, in tokens; single ones vary around them.

    A session is a chat, a single request, or an agent's task. The k-th system prompt is 1/k as popular as the first.
    Where prompt and output would be longer than `max_tokens`, answers are cut, and longer prompts end a session.
    """

    requests: int = option(1000, type=COUNT, help="Requests to generate.")
    rate: float = option(
        1.0, type=Number(1e-6, 1e9), help="New sessions a second: chats, single requests, or agents' tasks."
    )
    prefixes: int = option(
        8, type=click.IntRange(1, 10**6), help="Different system prompts, the first the most popular."
    )
    prefix_tokens: int = option(1024, type=click.IntRange(0, MAX_LENGTH), help="Mean tokens of a system prompt.")
    prompt_tokens: int = option(256, type=LENGTH, help="Mean tokens of what a user says, or a tool returns.")
    output_tokens: int = option(256, type=LENGTH, help="Mean tokens of an answer.")
    turns: float = option(6.0, type=Number(1, 1e9), help="Mean requests of a chat or a task.")
    pause: float = option(
        15.0, type=Number(0, 1e9), help="Mean seconds from an answer to the next request of its session."
    )
    branch_percent: int = option(
        10, type=click.IntRange(0, 100), help="Of 100 agent's requests, how many start two more agents."
    )
    max_tokens: int = option(
        1 << 17, type=click.IntRange(2, MAX_TOKENS), help="Most tokens of prompt and output together."
    )

    def __post_init__(self) -> None:
        for name, limits in LIMITS.items():
            value = getattr(self, name)
            if isinstance(limits, click.IntRange):
                check_whole(name, value, int(limits.min or 0), int(limits.max or 0))
            elif not (limits.min or 0) <= value <= (limits.max or 0):
                raise ConfigError(name, value, f"a number from {limits.min:g} to {limits.max:g}")


LIMITS: dict[str, Any] = {each.name or "": each.type for each in parameters(Workload)}
"""Types of a workload's parameters, by name."""


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

    def run(self, follow: Follow) -> Iterator[NewRequest]:
        """Yields the workload's requests; `follow` gets each and may plan further ones."""
        opening, sent = 0.0, 0
        while sent < self.workload.requests:
            if not self._sessions or opening <= self._sessions[0].time:
                [prefix] = self._random.choices(self._prefixes, self._popularity)
                self.plan(opening, self.say(prefix)[: self.workload.max_tokens - 1], self._turns() - 1)
                opening += self._wait(1 / self.workload.rate)
                continue
            session = heapq.heappop(self._sessions)
            answer = self._text(self.workload.output_tokens)[: self.workload.max_tokens - len(session.context)]
            yield NewRequest(
                line=sent + 1,
                timestamp=round(session.time * 1000),
                input_length=len(session.context),
                output_length=len(answer),
                tokens=session.context,
                output_tokens=answer,
            )
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


def generate(kind: str, workload: Workload, seed: int) -> Iterator[NewRequest]:
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
    check_whole("seed", seed, 0, 2**31 - 1)
    return _Generator(workload, seed).run(_FOLLOW[kind])


FORMATS = ("mooncake", "tokens")


def trace_lines(requests: Iterable[NewRequest], format: str, tokens_per_id: int) -> Iterator[dict[str, Any]]:
    """One JSON object a request: with all tokens, generated ones too, or as Mooncake's traces have it."""
    if format not in FORMATS:
        raise ConfigError("format", format, f"one of {', '.join(FORMATS)}")
    return own_lines(requests, None if format == "tokens" else tokens_per_id)


# Token sequences that never repeat, the same on every machine.

VOCABULARY = 100_000
"""Tokens are numbers below this."""


class Texts:
    """An endless supply of tokens: the n-th depends on the seed and on n alone (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self._next = (seed % 2**31) << 33

    def new(self, length: int) -> np.ndarray:
        """The next `length` tokens, uint32."""
        state = np.arange(self._next, self._next + length, dtype=np.uint64)
        self._next += length
        with np.errstate(over="ignore"):
            state *= np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        return (state % np.uint64(VOCABULARY)).astype(np.uint32)

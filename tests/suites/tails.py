"""Prompts that end inside a block, sent again at once, and several of one text in one step, some past the cache.

Partly filled states are hit, moved to copies, given back, and found before they are written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from hkv.contract.traffic import Choices, RandomChoices
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, CacheState, Header, Hit
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.traffic import Perform
from tests.reference.build import allocation
from tests.suites.history import HistorySuite
from tests.suites.watched import WATCHED

Begin: TypeAlias = Callable[[RandomChoices, str], tuple[Header, Callable[[Perform], None]]]
"""Makes the configuration of an example, and what is played over it, of choices and a topic."""


def beginning(scheduler: Callable[[Header, Choices, Perform], Tails], steps: int, blocks: tuple[int, int]) -> Begin:
    """Examples of a cache whose states are kept inside blocks, and of requests that all begin with one text."""

    def begin(choices: RandomChoices, topic: str) -> tuple[Header, Callable[[Perform], None]]:
        header = draw_header(choices, topic, version=2)
        header = msgspec.structs.replace(header, num_blocks=choices.integer(*blocks), watermark=0.0, bugs=[])

        def play(perform: Perform) -> None:
            player = scheduler(header, choices, perform)
            for _ in range(steps):
                player.step()

        return header, play

    return begin


@dataclasses.dataclass
class _Request:
    id: str
    length: int
    computed: int = 0
    before: int = 0
    owed: bool = False
    late: bool = False


class Tails:
    """Requests of one text, cut where a key ends and one token beyond, two at a time."""

    def __init__(self, header: Header, choices: Choices, perform: Perform) -> None:
        self._choices = choices
        self._perform = perform
        self._unit = header.hash_block_size
        longest = min(3 * header.scheduler_block_size, header.max_model_len - 4)
        self._states = [group["block_size"] for group in header.groups if group["kind"] == "mamba"]
        self._text = [choices.integer(0, 1) for _ in range(longest)]
        self._longest = longest + 3
        self._running: list[_Request] = []
        self._waiting: list[_Request] = []
        self._arrived = 0

    def step(self) -> None:
        """One scheduling step: running requests go on, waiting ones are admitted, copies are done."""
        self._perform(oplog.StepOp())
        for request in list(self._running):
            self._continue(request)
        if not self._running and self._choices.chance(25):
            self._perform(oplog.ResetOp())
        if len(self._running) + len(self._waiting) < 2:
            self._arrive()
        for request in list(self._waiting):
            self._admit(request)
        self._perform(oplog.CopiesOp())
        self._perform(oplog.EventsOp())

    def _arrive(self) -> None:
        """A prompt that ends where a key does, or one or two tokens later."""
        most = max(1, len(self._text) // self._unit)
        length = self._unit * self._choices.integer(1, most) + self._choices.integer(0, 2)
        tokens = self._text[: min(length, len(self._text))]
        request = _Request(f"r{self._arrived}", len(tokens))
        self._arrived += 1
        self._waiting.append(request)
        self._perform(oplog.RequestOp(id=request.id, tokens=tokens))

    def _admit(self, request: _Request) -> None:
        found = self._perform(oplog.LookupOp(id=request.id))
        assert isinstance(found, Hit)
        if self._allocate(request, self._chunk(request, found.hit), found.hit, self._kept_back()):
            self._waiting.remove(request)
            self._running.append(request)

    def _kept_back(self) -> int:
        """Blocks set aside: mostly none, else all but a few of those that are free."""
        if self._choices.chance(50):
            return 0
        state = self._perform(oplog.StateOp())
        assert isinstance(state, CacheState)
        return max(0, len(state.free) - self._choices.integer(1, 8))

    def _chunk(self, request: _Request, start: int) -> int:
        """Tokens of the next chunk: all that are left, or up to where a key ends."""
        left = request.length - start
        end = (start // self._unit + self._choices.integer(1, 3)) * self._unit
        return left if self._choices.chance(50) else min(left, end - start)

    def _continue(self, request: _Request) -> None:
        if request.owed and self._choices.chance(70):
            early = request.before and self._choices.chance(50) and self._stands(request)
            self._perform(oplog.CommitOp(id=request.id, tokens=request.before if early else request.computed))
            request.owed = False
        if request.computed == request.length and (request.length >= self._longest or self._choices.chance(35)):
            self._running.remove(request)
            self._perform(oplog.FreeOp(id=request.id))
            return
        if request.computed == request.length:
            self._perform(oplog.AppendOp(id=request.id, tokens=[self._choices.integer(0, 1)]))
            request.length += 1
        self._allocate(request, self._chunk(request, request.computed), 0, 0)

    def _stands(self, request: _Request) -> bool:
        """True if the last chunk left alone the columns in which the one before it left its states, and their keys."""
        return request.late and all(-(-request.before // size) < -(-request.computed // size) for size in self._states)

    def _allocate(self, request: _Request, new: int, hit: int, reserved: int) -> bool:
        late = self._choices.chance(25)
        answer = self._perform(allocation(request.id, new, hit, delay=late, reserved=reserved))
        assert isinstance(answer, Allocation)
        if answer.blocks is None:
            return False
        request.before, request.computed = request.computed, request.computed + hit + new
        request.owed, request.late = request.owed or late, late
        self._perform(oplog.AdvanceOp(id=request.id, tokens=hit + new))
        return True


SUITE = HistorySuite(
    "tails",
    "the reference manager when prompts that end inside a block are sent again at once",
    ("partial",),
    WATCHED,
    beginning(Tails, steps=7, blocks=(30, 60)),
    pace=4,
)


class Siblings(Tails):
    """One request that leaves a state where its prompt ends, then several more of its text side by side.

    A request that wants its prompt's own probabilities computes all of it, whatever is cached. So blocks are filled
    beside cached ones of the same text, and whoever looks in the same step may be shown those.
    """

    def step(self) -> None:
        """One scheduling step: running requests end or go on, one request or several come, copies are done."""
        self._perform(oplog.StepOp())
        for request in list(self._running):
            if self._choices.chance(40):
                self._running.remove(request)
                self._perform(oplog.FreeOp(id=request.id))
            else:
                self._continue(request)
        alone = self._arrived == 0 or self._choices.chance(30)
        for place in range(1 if alone else self._choices.integer(2, 3)):
            self._come(alone, heeds=alone or self._choices.chance(80 if place else 20))
        self._perform(oplog.CopiesOp())
        self._perform(oplog.EventsOp())

    def _come(self, alone: bool, heeds: bool) -> None:
        self._arrive()
        request = self._waiting.pop()
        found = self._perform(oplog.LookupOp(id=request.id))
        assert isinstance(found, Hit)
        hit = found.hit if heeds else 0
        end = (request.length - 1) // self._unit * self._unit
        new = end - hit if alone and end > hit else self._chunk(request, hit)
        if self._allocate(request, new, hit, 0):
            self._running.append(request)
        else:
            self._perform(oplog.DropOp(id=request.id))


SIBLINGS = HistorySuite(
    "siblings",
    "the reference manager when several requests of one text come in one step, some of which ignore the cache",
    ("partial",),
    WATCHED,
    beginning(Siblings, steps=5, blocks=(40, 90)),
    pace=4,
)

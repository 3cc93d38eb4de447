"""The reference manager under random traffic, and when two prompts take turns in a pool that hardly holds both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hkv.contract.traffic import Choices, RandomChoices
from hkv.dialects.vllm.config import manager_block
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Allocation, Answer, Header, Hit, Operation
from hkv.dialects.vllm.traffic.headers import FEATURES, copies_states, draw_header
from hkv.dialects.vllm.traffic.live import drive
from hkv.dialects.vllm.traffic.traffic import Perform
from hkv.spec import spec_from_log
from tests.reference.build import allocation
from tests.suites.history import HistorySuite
from tests.suites.watched import WATCHED

STEPS = 10
"""Scheduling steps of one example."""


def begin(choices: RandomChoices, topic: str) -> tuple[Header, Callable[[Callable[[Operation], Answer]], None]]:
    """Random lock-step traffic over a small pool, prefixes that come back, lengths around every modulus."""
    header = draw_header(choices, topic, version=2)
    if choices.chance(50):
        # Whoever names no defect is held to the contract, also where vLLM 0.33 fails.
        header = msgspec.structs.replace(header, bugs=[])

    def play(perform: Callable[[Operation], Answer]) -> None:
        drive(header, choices, perform, STEPS, careful=bool(header.bugs))

    return header, play


SUITE = HistorySuite(
    "traffic",
    "the reference manager under random traffic, A then B then A again, over tiny pools",
    FEATURES,
    WATCHED,
    begin,
)


def begin_turns(choices: RandomChoices, topic: str) -> tuple[Header, Callable[[Perform], None]]:
    """Two prompts take turns in a pool of about the size of one and a half of them."""
    header = draw_header(choices, topic, version=2)
    longest = max(2, min(48, header.max_model_len - 2))
    prompts = [[choices.integer(0, 1) for _ in range(choices.integer(longest // 3, longest))] for _ in range(2)]
    header = msgspec.structs.replace(header, num_blocks=_pool(choices, header, max(map(len, prompts))))

    def play(perform: Perform) -> None:
        turns = Turns(header, choices, perform)
        for number in range(6):
            turns.take(f"r{number}", prompts[number % 2])

    return header, play


def _pool(choices: Choices, header: Header, tokens: int) -> int:
    """Blocks for one prompt, and for none, half or all of another."""
    sizes = [manager_block(spec_from_log(group), header.context_parallel) for group in header.groups]
    one = sum(-(-tokens // size) for size in sizes)
    return 1 + one + choices.integer(0, one) + choices.integer(0, len(sizes))


class Turns:
    """One request at a time, now and then two."""

    def __init__(self, header: Header, choices: Choices, perform: Perform) -> None:
        self._header = header
        self._choices = choices
        self._perform = perform
        self._kept: str | None = None
        self._copying = copies_states(to_config(header))
        self._recurrent = any(group["kind"] == "mamba" for group in header.groups)

    def take(self, id: str, prompt: Sequence[int]) -> None:
        """One prompt, or a part of it, from its arrival to its end."""
        choices, perform = self._choices, self._perform
        length = len(prompt) if choices.chance(60) else choices.integer(1, len(prompt))
        perform(oplog.StepOp())
        perform(oplog.RequestOp(id=id, tokens=list(prompt[:length])))
        found = perform(oplog.LookupOp(id=id))
        assert isinstance(found, Hit)
        external = self._external(found.hit, length)
        start = found.hit + external
        stop = length if choices.chance(60) else choices.integer(start + 1, length)
        if not self._allocate(id, stop - start, found.hit, external):
            perform(oplog.DropOp(id=id))
            return
        perform(oplog.AdvanceOp(id=id, tokens=stop))
        self._settle()
        while stop < length:
            end = choices.integer(stop + 1, length)
            perform(oplog.StepOp())
            if not self._allocate(id, end - stop, 0, 0):
                break
            perform(oplog.AdvanceOp(id=id, tokens=end - stop))
            self._settle()
            stop = end
        if self._kept is not None:
            perform(oplog.FreeOp(id=self._kept))
            self._kept = None
        if choices.chance(30):
            self._kept = id
        else:
            perform(oplog.FreeOp(id=id))
            if choices.chance(10):
                perform(oplog.ResetOp())

    def _external(self, hit: int, length: int) -> int:
        unit = self._header.scheduler_block_size
        most = (length - 1) // unit * unit - hit
        if self._header.feature != "external" or self._recurrent or most < unit or self._choices.chance(30):
            return 0
        return unit * self._choices.integer(1, most // unit)

    def _allocate(self, id: str, new: int, hit: int, external: int) -> bool:
        answer = self._perform(allocation(id, new, hit, external=external))
        assert isinstance(answer, Allocation)
        return answer.blocks is not None

    def _settle(self) -> None:
        if self._copying:
            self._perform(oplog.CopiesOp())
        self._perform(oplog.EventsOp())


COMEBACK = HistorySuite(
    "comeback",
    "the reference manager when two prompts take turns in a pool that hardly holds both",
    FEATURES,
    WATCHED,
    begin_turns,
    pace=3,
)

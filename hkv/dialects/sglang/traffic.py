"""Random traffic under SGLang's rules: what its scheduler asks of a cache, and oftener than it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hkv.contract.traffic import Choices
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS, POLICIES
from hkv.dialects.sglang.lifecycle import RunningRequest, SGLangLifecycle
from hkv.errors import HKVError

FEATURES = ("full", "window", "states", "eagle", "namespaces", "sorted")
"""Features of logs: full attention alone, with a window, with states, keys of bigrams, keys apart, pages sorted."""

MOVES = (
    *("admit", "extend", "chunk", "decode", "slide", "checkpoint"),
    *("release_window", "finish", "abort", "match", "evict", "room", "events", "state"),
)
"""Moves; the first begins the traffic."""

MOST_RUNNING = 4

MEMORY = 12
"""Earlier texts that a new prompt may continue."""


def draw_header(choices: Choices, feature: str, name: str, kinds: frozenset[str] = frozenset()) -> structs.Header:
    """A configuration with small pages, and pools that are soon full; 0.5.23's defects are reproduced."""
    size = choices.pick((1, 1, 2, 4, 16))
    pages = choices.integer(6, 40)
    groups: list[dict[str, Any]] = [{"kind": structs.FULL_ATTENTION, "block_size": size}]
    blocks = [pages]
    windowed = structs.SLIDING_WINDOW in kinds if kinds else feature == "window" or choices.chance(70)
    if windowed and feature != "full":
        window = choices.pick((1, 2, 3, 5, 8, 16, 33))
        groups.append({"kind": structs.SLIDING_WINDOW, "block_size": size, "window": window})
        blocks.append(choices.integer(3, pages))
    stateful, tracked = structs.STATES in kinds if kinds else feature == "states", choices.chance(70)
    if stateful:
        if not tracked:
            size = 1
            for group in groups:
                group["block_size"] = 1
        groups.append({"kind": structs.STATES, "block_size": size})
        blocks.append(choices.integer(17, 24))
    return structs.Header(
        dialect=name,
        feature=feature,
        num_blocks=blocks,
        groups=groups,
        policy=choices.pick(("lru", *POLICIES)),
        eagle=feature == "eagle",
        need_sort=feature == "sorted",
        tracked=stateful and tracked,
        most_states=choices.pick((-1, 1, 2)) if stateful else -1,
        bugs=sorted(BUGS),
    )


def drive(header: structs.Header, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
    """Performs random traffic: every operation is legal, and answers decide what comes next.

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
      steps: rounds of some moves; each ends with `state`.
    """
    traffic = SGLangTraffic(header, choices, perform)
    for _ in range(steps):
        for _ in range(choices.integer(2, 6)):
            move = choices.pick((*MOVES, "admit", "extend", "extend", "chunk", "decode", "decode", "finish"))
            if traffic.possible(move):
                traffic.make(move)
        traffic.make("state")


class SGLangTraffic:
    """Requests of a scheduler, move by move (`hkv.contract.traffic.Moves`).

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
    """

    def __init__(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any]) -> None:
        self._header, self._choices, self._perform = header, choices, perform
        self._size: int = header.groups[0]["block_size"]
        self._lifecycle = SGLangLifecycle(header)
        self._eagle = structs.to_config(header).bigrams
        self._texts: list[list[int]] = [[]]
        self._arrived = 0

    def possible(self, move: str) -> bool:
        """True if there is a request, or room for one, that the move can be about."""
        if move in ("admit", "match", "evict", "room", "events", "state"):
            return move != "admit" or len(self._lifecycle.requests) < MOST_RUNNING
        return bool(self._candidates(move))

    def make(self, move: str) -> None:
        """Makes a move."""
        choices = self._choices
        match move:
            case "admit":
                self._arrived += 1
                priority = choices.integer(0, 2) if self._header.policy == "priority" else 0
                self._ask(structs.AdmitOp(id=f"r{self._arrived}", priority=priority, **self._keyed()))
            case "match":
                self._ask(structs.MatchOp(**self._keyed()))
            case "evict":
                self._ask(structs.EvictOp(tokens=[choices.integer(0, 5 * self._size) for _ in self._header.num_blocks]))
            case "room":
                self._ask(structs.RoomOp(tokens=choices.integer(0, 5 * self._size)))
            case "events" | "state":
                self._ask(structs.FORMAT.operations[move]())
            case "chunk":
                self._ask(operation := choices.pick(self._candidates(move)))
                entering = structs.CheckpointOp(id=operation.id)
                if self._legal(entering):
                    self._ask(entering)
            case _:
                self._ask(choices.pick(self._candidates(move)))

    def _candidates(self, move: str) -> list[Any]:
        return [one for id in self._lifecycle.requests if self._legal(one := self._operation(move, id))]

    def _operation(self, move: str, id: str) -> Any:
        """An operation on a request; of which tokens, and how many, is drawn."""
        request, choices = self._lifecycle.requests[id], self._choices
        if move in ("extend", "chunk"):
            left = request.tokens - request.computed
            length = request.computed + choices.pick((left, choices.integer(1, left or 1)))
            return structs.ExtendOp(id=id, length=length, track=self._kept(request, length))
        if move == "decode":
            kept = self._header.tracked and (request.computed + 1) % self._size == 0
            return structs.DecodeOp(id=id, token=choices.integer(0, 2), track=kept)
        if move == "finish" and choices.chance(25):  # a pass was on its way when it ended
            least = max(request.least(self._eagle), request.computed - 2, 1)
            return structs.FinishOp(id=id, length=choices.integer(min(least, request.computed), request.computed))
        kind = structs.FORMAT.operations[move]
        return kind(id=id)

    def _kept(self, request: RunningRequest, length: int) -> int:
        """Length at which a pass keeps a state: the last that it can, or where the tree's prefix went on without one
        (`mamba_branching_seqlen`)."""
        last = request.computed + (length - request.computed) // self._size * self._size
        if not self._header.tracked or last == request.computed:
            return 0
        return request.branch if request.computed < request.branch < last else last

    def _legal(self, operation: Any) -> bool:
        try:
            self._lifecycle.check(operation)
        except HKVError:
            return False
        return True

    def _ask(self, operation: Any) -> None:
        self._lifecycle.follow(operation)
        self._lifecycle.answered(operation, self._perform(operation))

    def _keyed(self) -> dict[str, Any]:
        """Tokens that often begin as earlier ones did, of a length next to a page's."""
        choices = self._choices
        known = choices.pick(self._texts)
        more = [choices.integer(0, 2) for _ in range(choices.integer(1, 4 * self._size))]
        tokens = known[: choices.integer(0, len(known))] + more
        self._texts = [*self._texts, tokens][-MEMORY:]
        keys: dict[str, Any] = {"tokens": tokens}
        if self._header.feature == "namespaces":
            keys |= {"adapter": choices.pick((None, None, "a", "b")), "salt": choices.pick((None, None, "s"))}
        return keys

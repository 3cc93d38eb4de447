"""Makes a failing log small: as few requests, operations, tokens and blocks as still make two engines disagree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hkv.errors import HKVError
from hkv.oracle import oplog
from hkv.oracle.compare import Mismatch
from hkv.oracle.configuration import to_config
from hkv.oracle.engine import EngineFactory, Failure
from hkv.oracle.lifecycle import Lifecycle
from hkv.oracle.oplog import Answer, Header, Operation
from hkv.oracle.pair import Pair, make_pair
from hkv.oracle.reduction import Best, Candidates, Case, each, replaced, without_requests, without_runs
from hkv.oracle.repair import repaired
from hkv.oracle.rtp_llm.shrink_steps import RTP_STEPS, first_rtp_disagreement
from hkv.oracle.rtp_llm.structs import RtpHeader

__all__ = ["ATTEMPTS", "SECONDS", "STEPS", "Case", "Shrinker"]

ATTEMPTS = 3000
"""Most candidates that are tried."""

SECONDS = 60.0
"""Seconds after which no further candidate is tried, unless told otherwise: an engine may hang at each."""


class Shrinker:
    """Shrinks a failing case.

    Every candidate is first repaired: operations that can no longer follow are left out, numbers that no longer fit are
    cut, so that what is left is legal traffic whichever part was taken away. It counts if the engines still disagree,
    wherever, and a wrong answer does not turn into a failure; what comes after the first disagreement is dropped.

    Args:
      tested: the engine in doubt.
      right: the engine that counts.
      ids: `exact` or `isomorphic`, how block ids are compared.
      progress: called after each attempt with the number of operations left.
      seconds: after so many no further candidate is tried.

    Attributes:
      progress: as given; may be set anew.
      attempts: candidates tried so far.
    """

    def __init__(
        self,
        tested: EngineFactory,
        right: EngineFactory,
        ids: str = "exact",
        progress: Callable[[int], None] = lambda left: None,
        seconds: float = SECONDS,
    ) -> None:
        self._tested, self._right, self._ids, self._seconds = tested, right, ids, seconds
        self.progress = progress
        self.attempts = 0

    def failing(self, header: Header | RtpHeader, operations: Sequence[Any]) -> Case | None:
        """The case up to the first disagreement, after repairs; None if the engines agree, or the right one fails."""
        try:
            pair = make_pair(self._tested, self._right, header, self._ids)
        except HKVError:
            return None
        if isinstance(pair, Mismatch):
            return None
        first: Callable[..., Any] = first_rtp_disagreement if isinstance(header, RtpHeader) else _first_disagreement
        found = first(pair, header, operations)
        return None if found is None else Case(header, *found)

    def shrink(self, case: Case) -> Case:
        """The smallest case found: no single step makes it smaller, unless attempts or seconds ran out."""
        best, deadline = Best(case), time.monotonic() + self._seconds
        steps: Sequence[Callable[[Any], Any]] = RTP_STEPS if isinstance(case.header, RtpHeader) else STEPS
        while True:
            before = best.case.size
            for simpler in steps:
                for header, operations in simpler(best):
                    if self.attempts >= ATTEMPTS or time.monotonic() > deadline:
                        return best.case
                    self.attempts += 1
                    found = self.failing(header, operations)
                    if found is not None and found.size < best.case.size and found.fails == case.fails:
                        best.case = found
                    self.progress(len(best.case.operations))
            if best.case.size >= before:
                return best.case


def _first_disagreement(
    pair: Pair, header: Header, operations: Sequence[Operation]
) -> tuple[tuple[Operation, ...], tuple[Answer, ...], Mismatch] | None:
    lifecycle = Lifecycle(header)
    performed: list[Operation] = []
    answers: list[Answer] = []
    for wanted in operations:
        operation = repaired(wanted, lifecycle, performed, answers)
        if operation is None:
            continue
        try:
            lifecycle.follow(operation)
        except HKVError:
            continue
        want, mismatch = pair.perform(operation)
        if isinstance(want, Failure):
            return None
        performed.append(operation)
        answers.append(want)
        if mismatch is not None:
            return tuple(performed), tuple(answers), mismatch
        lifecycle.answered(operation, want)
    return None


def _with_shorter_tokens(best: Best) -> Candidates:
    """One token list shorter, or all of one token."""
    for index, operation in each(best):
        tokens = _tokens(operation)
        least = 1 if isinstance(operation, oplog.RequestOp) else 0
        for length in sorted({least, len(tokens) // 2, len(tokens) - 4, len(tokens) - 1}):
            if least <= length < len(tokens):
                yield replaced(best, index, tokens=tokens[:length])
        if len(set(tokens)) > 1:
            yield replaced(best, index, tokens=[min(tokens)] * len(tokens))


def _with_renumbered_tokens(best: Best) -> Candidates:
    """Tokens called 1, 2, 3 and so on."""
    operations = best.case.operations
    known = sorted({token for operation in operations for token in _tokens(operation)})
    names = {token: name for name, token in enumerate(known, 1)}
    yield (
        best.case.header,
        [
            msgspec.structs.replace(operation, tokens=[names[token] for token in _tokens(operation)])
            if _tokens(operation)
            else operation
            for operation in operations
        ],
    )


_PLAIN: dict[str, Any] = {
    "lookahead": 0,
    "external": 0,
    "delay": False,
    "must_fit": False,
    "reserved": 0,
    "in_flight": 0,
    "shared_prefix": None,
    "extra": None,
}


def _with_simpler_fields(best: Best) -> Candidates:
    """One field at its plainest value, or one number smaller."""
    for index, operation in each(best):
        for name, plain in _PLAIN.items():
            if getattr(operation, name, plain) != plain:
                yield replaced(best, index, **{name: plain})
        for name in ("new", "lookahead", "reserved", "tokens"):
            value = getattr(operation, name, None)
            if type(value) is int and value > 0:
                for smaller in sorted({0, value // 2, value - 1}):
                    yield replaced(best, index, **{name: smaller})
        if isinstance(operation, oplog.EvictOp):
            for block in operation.blocks:
                yield replaced(best, index, blocks=[other for other in operation.blocks if other != block])


def _with_less(best: Best) -> Candidates:
    """A smaller configuration: a group or feature less, fewer blocks."""
    for header in _headers(best.case.header):
        try:
            to_config(header)
        except HKVError:
            continue
        yield header, list(best.case.operations)


def _with_smaller_pool(best: Best) -> Candidates:
    """Fewer blocks, and an allocation that asks for as many fewer."""
    for index, operation in each(best):
        if not isinstance(operation, oplog.AllocateOp):
            continue
        size = max(group["block_size"] for group in best.case.header.groups)
        for blocks in (best.case.header.num_blocks // 2, 4, 1):
            left, new = best.case.header.num_blocks - blocks, operation.new - blocks * size
            if blocks and left >= 2 and new > 0:
                header = msgspec.structs.replace(best.case.header, num_blocks=left)
                yield header, replaced(best, index, new=new)[1]


STEPS = (
    without_runs,
    _with_less,
    without_requests,
    without_runs,
    _with_shorter_tokens,
    _with_simpler_fields,
    _with_smaller_pool,
    _with_renumbered_tokens,
)
"""What makes a case smaller, in the order in which it is tried; again from the start until nothing helps."""


def _headers(header: Header) -> Iterator[Header]:
    for index in range(len(header.groups) if len(header.groups) > 1 else 0):
        groups = header.groups[:index] + header.groups[index + 1 :]
        eagle = [group - (group > index) for group in header.eagle_groups if group != index]
        plain = header.partial_hits and len(groups) > 1
        yield msgspec.structs.replace(header, groups=groups, eagle_groups=eagle, partial_hits=plain)
        yield msgspec.structs.replace(
            header,
            groups=groups,
            eagle_groups=eagle,
            partial_hits=False,
            hash_block_size=groups[0]["block_size"],
            scheduler_block_size=groups[0]["block_size"],
        )
    for size in sorted({2, header.num_blocks // 2, header.num_blocks - 4, header.num_blocks - 1}):
        if 2 <= size < header.num_blocks:
            yield msgspec.structs.replace(header, num_blocks=size)
    plainer = {"watermark": 0.0, "shared_prefix_checkpoint": False, "retention_interval": None, "bugs": []}
    for name, value in {**plainer, "prefill_lookahead": 0, "max_in_flight_tokens": None}.items():
        if getattr(header, name) != value:
            yield msgspec.structs.replace(header, **{name: value})


def _tokens(operation: Operation) -> list[int]:
    tokens = getattr(operation, "tokens", None)
    return tokens if isinstance(tokens, list) else []

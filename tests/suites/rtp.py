"""The reference under RTP-LLM's rules: requests that come, grow, fork, are cached, exported, evicted and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hkv.contract.traffic import RandomChoices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.invariants import RTP_INVARIANTS, RtpWatch
from hkv.dialects.rtp_llm.lifecycle import RtpLifecycle
from hkv.dialects.rtp_llm.log import RtpAnswer, RtpHeader, RtpOp
from hkv.dialects.rtp_llm.traffic import draw_rtp_header, drive_rtp, rtp_features
from hkv.errors import OperationError
from tests.suites.history import Broken, HistorySuite, Setting

STEPS = 8
"""Rounds of one example."""

TOPICS = tuple(f"{dialect} {feature}" for dialect in NAMES for feature in rtp_features(dialect))
"""Each dialect with each feature of its logs."""


def begin(choices: RandomChoices, topic: str) -> tuple[RtpHeader, Callable[[Callable[[RtpOp], RtpAnswer]], None]]:
    """Random traffic over small pools."""
    dialect, _, feature = topic.partition(" ")
    header = draw_rtp_header(choices, feature, dialect)

    def play(perform: Callable[[RtpOp], RtpAnswer]) -> None:
        drive_rtp(header, choices, perform, STEPS)

    return header, play


def open_run(header: RtpHeader, only: str | None) -> RtpWatch:
    """The reference under watch."""
    chosen = [invariant for name, invariant in RTP_INVARIANTS.items() if only in (None, name)]
    return RtpWatch(RtpNumpyEngine(header), header, chosen)


class RtpLegal:
    """Operations that may be asked next, by those so far."""

    def __init__(self, header: RtpHeader, run: RtpWatch) -> None:
        self._lifecycle = RtpLifecycle()
        self._ledger = run.ledger

    def in_order(self, operation: RtpOp) -> bool:
        """Always: one operation decides nothing about the next."""
        return True

    def fit(self, operation: RtpOp) -> RtpOp | None:
        """The operation, for as many sequences as there are; None when it cannot be asked now."""
        id = getattr(operation, "id", None)
        record = self._ledger.requests.get(id) if id is not None else None
        if isinstance(operation, structs.AppendOp) and record is not None:
            rows = (operation.tokens * len(record.tokens))[: len(record.tokens)]
            operation = msgspec.structs.replace(operation, tokens=rows)
        elif isinstance(operation, structs.ForkOp) and record is not None:
            sources = [min(source, len(record.tokens) - 1) for source in operation.sources]
            operation = msgspec.structs.replace(operation, sources=sources)
        elif isinstance(operation, structs.HoldOp) and record is not None:
            sequence = min(operation.sequence, len(record.tokens) - 1)
            operation = msgspec.structs.replace(operation, sequence=sequence)
        try:
            self._lifecycle.follow(operation)
        except OperationError:
            return None
        return operation

    def note(self, operation: RtpOp, answer: RtpAnswer) -> None:
        """Takes note of an answer."""
        if hasattr(operation, "want"):
            self._lifecycle.answered(operation, answer)


def simpler(broken: Broken[RtpHeader, RtpOp]) -> Iterator[tuple[RtpHeader, list[RtpOp]]]:
    """Shorter and plainer prompts, fewer sequences, no reserve, smaller pools."""
    header, operations = broken.header, list(broken.operations)
    for position, operation in enumerate(operations):
        for plainer in _plainer(operation):
            yield header, [*operations[:position], plainer, *operations[position + 1 :]]
    for index, blocks in enumerate(header.num_blocks):
        for fewer in sorted({2, blocks // 2, blocks - 1}):
            if 2 <= fewer < blocks and not header.groups[index].explicit_block_num:
                counts = [*header.num_blocks[:index], fewer, *header.num_blocks[index + 1 :]]
                yield msgspec.structs.replace(header, num_blocks=counts), operations
    if header.reserve_blocks:
        yield msgspec.structs.replace(header, reserve_blocks=0), operations


def _plainer(operation: RtpOp) -> Iterator[RtpOp]:
    change: Any = msgspec.structs.replace
    match operation:
        case structs.RequestOp():
            tokens = operation.tokens
            if operation.reserve:
                yield change(operation, reserve=0)
            if operation.sequences > 1:
                yield change(operation, sequences=operation.sequences - 1)
            for length in sorted({1, len(tokens) // 2, len(tokens) - 1}):
                if 0 < length < len(tokens):
                    yield change(operation, tokens=tokens[:length])
            if set(tokens) != {0}:
                yield change(operation, tokens=[0] * len(tokens))
        case structs.MallocOp():
            if not (operation.reuse and operation.device_cache):
                yield change(operation, reuse=True, device_cache=True)
            if operation.length is not None:
                yield change(operation, length=None)
        case structs.AppendOp() if len(operation.tokens[0]) > 1:
            yield change(operation, tokens=[row[:1] for row in operation.tokens])
        case structs.ForkOp() if len(operation.sources) > 1:
            yield change(operation, sources=operation.sources[:-1])
        case _:
            return


SUITE: HistorySuite[RtpHeader, RtpOp] = HistorySuite(
    "rtp",
    "the reference under RTP-LLM's rules, under random traffic",
    TOPICS,
    Setting(open_run, RtpLegal, simpler),  # type: ignore[arg-type]
    begin,
    pace=2,
)

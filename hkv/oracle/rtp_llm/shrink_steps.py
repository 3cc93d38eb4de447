"""What makes a failing case under RTP-LLM's rules smaller, and what keeps it legal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hkv.dialects.rtp_llm.config import HYBRID, SINGLE
from hkv.errors import HKVError
from hkv.oracle.compare import Mismatch
from hkv.oracle.engine import Failure
from hkv.oracle.reduction import Best, Candidates, each, replaced, without_requests, without_runs
from hkv.oracle.rtp_llm import structs
from hkv.oracle.rtp_llm.configuration import to_rtp_config
from hkv.oracle.rtp_llm.lifecycle import RtpLifecycle
from hkv.oracle.rtp_llm.pair import RtpPair
from hkv.oracle.rtp_llm.structs import RtpAnswer, RtpHeader, RtpOp


def first_rtp_disagreement(
    pair: RtpPair, header: RtpHeader, operations: Sequence[RtpOp]
) -> tuple[tuple[RtpOp, ...], tuple[RtpAnswer, ...], Mismatch] | None:
    """Operations up to the first at which two engines disagree, the right one's answers, and where they differ.

    Operations that cannot follow are repaired or left out. None if the engines agree, or if the right one fails.
    """
    lifecycle = RtpLifecycle()
    performed: list[RtpOp] = []
    answers: list[RtpAnswer] = []
    for wanted in operations:
        operation = repaired_rtp(wanted, lifecycle)
        if operation is None:
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


def repaired_rtp(operation: RtpOp, lifecycle: RtpLifecycle) -> RtpOp | None:
    """The operation fitted to the sequences that its request has now and followed; None when it cannot follow."""
    if hasattr(operation, "want"):
        operation = msgspec.structs.replace(operation, want=None)
    width = lifecycle.requests.get(getattr(operation, "id", ""), 0)
    if isinstance(operation, structs.AppendOp) and operation.tokens and width:
        rows = [*operation.tokens, *[operation.tokens[-1]] * width][:width]
        operation = msgspec.structs.replace(operation, tokens=rows)
        if not rows[0]:
            return None
    if isinstance(operation, structs.ForkOp) and width:
        sources = [source for source in operation.sources if source < width]
        if not sources:
            return None
        operation = msgspec.structs.replace(operation, sources=sources)
    if isinstance(operation, structs.HoldOp) and operation.sequence >= width:
        operation = msgspec.structs.replace(operation, sequence=0)
    try:
        lifecycle.follow(operation)
    except HKVError:
        return None
    return operation


def _with_longer_prompts(best: Best) -> Candidates:
    """An append less, its tokens part of the prompt."""
    for index, operation in each(best):
        if isinstance(operation, structs.AppendOp):
            operations = list(best.case.operations)
            for place, other in enumerate(operations[:index]):
                if isinstance(other, structs.RequestOp) and other.id == operation.id:
                    tokens = [*other.tokens, *operation.tokens[0]]
                    operations[place] = msgspec.structs.replace(other, tokens=tokens)
            yield best.case.header, operations[:index] + operations[index + 1 :]


def _with_shorter_tokens(best: Best) -> Candidates:
    """A prompt shorter, or all of one token; appended tokens fewer."""
    for index, operation in each(best):
        if isinstance(operation, structs.RequestOp):
            tokens = operation.tokens
            for length in sorted({1, len(tokens) // 2, len(tokens) - 4, len(tokens) - 1}):
                if 1 <= length < len(tokens):
                    yield replaced(best, index, tokens=tokens[:length])
            if len(set(tokens)) > 1:
                yield replaced(best, index, tokens=[min(tokens)] * len(tokens))
        elif isinstance(operation, structs.AppendOp) and len(operation.tokens[0]) > 1:
            yield replaced(best, index, tokens=[row[:1] for row in operation.tokens])


def _with_equal_tokens(best: Best) -> Candidates:
    """All tokens of the case called 1, 2, 3 and so on; or one of them like another."""
    known = sorted({token for operation in best.case.operations for token in _tokens(operation)})
    names = {token: name for name, token in enumerate(known, 1)}
    yield _renamed(best, names)
    for token in known[1:]:
        yield _renamed(best, {token: known[0]})


def _renamed(best: Best, names: dict[int, int]) -> tuple[Any, list[Any]]:
    operations = []
    for operation in best.case.operations:
        if isinstance(operation, structs.RequestOp):
            operation = msgspec.structs.replace(operation, tokens=[names.get(t, t) for t in operation.tokens])
        elif isinstance(operation, structs.AppendOp):
            rows = [[names.get(token, token) for token in row] for row in operation.tokens]
            operation = msgspec.structs.replace(operation, tokens=rows)
        operations.append(operation)
    return best.case.header, operations


def _tokens(operation: RtpOp) -> list[int]:
    if isinstance(operation, structs.RequestOp):
        return operation.tokens
    return [token for row in operation.tokens for token in row] if isinstance(operation, structs.AppendOp) else []


PLAIN: dict[str, Any] = {
    "sequences": 1,
    "reserve": 0,
    "reuse": True,
    "device_cache": True,
    "resident": False,
    "copy_last": True,
    "connector": True,
    "sequence": 0,
    "remaining": 0,
}
"""Fields and their plainest values; of an estimate, `sequences` and `reuse` are plainest at 0 and false."""


def _with_simpler_fields(best: Best) -> Candidates:
    """One field at its plainest, a fork of fewer sequences, fewer blocks asked for."""
    for index, operation in each(best):
        plain = {**PLAIN, "sequences": 0, "reuse": False} if isinstance(operation, structs.PeakOp) else PLAIN
        for name, value in plain.items():
            if getattr(operation, name, value) != value:
                yield replaced(best, index, **{name: value})
        if isinstance(operation, structs.ForkOp) and len(operation.sources) > 1:
            for place in range(len(operation.sources)):
                yield replaced(best, index, sources=operation.sources[:place] + operation.sources[place + 1 :])
        for name in ("least", "remaining", "sequences"):
            value = getattr(operation, name, 0)
            for smaller in sorted({1, value // 2, value - 1}):
                if 0 < smaller < value:
                    yield replaced(best, index, **{name: smaller})


def _with_less(best: Best) -> Candidates:
    """A smaller configuration: a group less, fewer blocks, a switch off."""
    for header in _headers(best.case.header):
        try:
            to_rtp_config(header)
        except HKVError:
            continue
        yield header, list(best.case.operations)


def _headers(header: RtpHeader) -> Iterator[RtpHeader]:
    change = msgspec.structs.replace
    apart = len(header.num_blocks) > 1
    for index in range(len(header.groups) if len(header.groups) > 1 else 0):
        groups = header.groups[:index] + header.groups[index + 1 :]
        counts = header.num_blocks[:index] + header.num_blocks[index + 1 :] if apart else header.num_blocks
        yield change(header, groups=groups, num_blocks=counts)
        if header.dialect == HYBRID and len(groups) == 1:
            yield change(header, groups=groups, dialect=SINGLE)
    for index, count in enumerate(header.num_blocks):
        for size in sorted({2, count // 2, count - 4, count - 1}):
            if 2 <= size < count:
                yield change(
                    header, num_blocks=[size if i == index else each for i, each in enumerate(header.num_blocks)]
                )
    plainer: dict[str, Any] = {"prefix_tree": False, "independent_eviction": False, "reserve_blocks": 0, "cp_rank": 0}
    for name, value in {**plainer, "linear_step": 1, "bugs": []}.items():
        if getattr(header, name) != value:
            yield change(header, **{name: value})


RTP_STEPS = (
    without_runs,
    _with_less,
    without_requests,
    without_runs,
    _with_longer_prompts,
    _with_shorter_tokens,
    _with_simpler_fields,
    _with_equal_tokens,
)
"""What makes a case smaller, in the order in which it is tried; again from the start until nothing helps."""

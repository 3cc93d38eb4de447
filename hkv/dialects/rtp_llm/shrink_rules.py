"""Shrinking of logs under RTP-LLM's rules: what is smaller than a configuration or an operation, what repairs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.case import Best, Candidates, LifecycleRepair, ShrinkRules
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.lifecycle import RtpLifecycle
from hkv.dialects.rtp_llm.log import RtpHeader, RtpOp, to_rtp_config


def _repair(header: RtpHeader) -> LifecycleRepair:
    """Fits operations to the sequences that their request has now."""
    lifecycle = RtpLifecycle()
    return LifecycleRepair(
        lifecycle, lambda operation: _fitted(operation, lifecycle.requests.get(getattr(operation, "id", ""), 0))
    )


def _fitted(operation: RtpOp, width: int) -> RtpOp | None:
    """The operation for a request of `width` sequences; 0 where there is no such request."""
    if hasattr(operation, "want"):
        operation = msgspec.structs.replace(operation, want=None)
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
    return operation


def _with_longer_prompts(best: Best) -> Candidates:
    """An append less, its tokens part of the prompt."""
    place = 0
    while place < len(best.case.operations):
        operations, append = list(best.case.operations), best.case.operations[place]
        place += 1
        if not isinstance(append, structs.AppendOp):
            continue
        for index, other in enumerate(operations[: place - 1]):
            if isinstance(other, structs.RequestOp) and other.id == append.id:
                operations[index] = msgspec.structs.replace(other, tokens=[*other.tokens, *append.tokens[0]])
        yield best.case.header, operations[: place - 1] + operations[place:]


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
    "length": None,
    "resident": False,
    "copy_last": True,
    "connector": True,
    "sequence": 0,
    "remaining": 0,
}
"""Fields and their plainest values; of an estimate, `sequences` and `reuse` are plainest at 0 and false. The device's
cache is asked for with `reuse` alone."""


def _simpler_operations(operation: RtpOp) -> Iterator[RtpOp]:
    """A prompt shorter, appended tokens fewer, one field at its plainest, fewer sequences, fewer blocks asked for."""
    change = msgspec.structs.replace
    if isinstance(operation, structs.RequestOp):
        yield from _shorter_prompts(operation)
    elif isinstance(operation, structs.AppendOp) and len(operation.tokens[0]) > 1:
        yield change(operation, tokens=[row[:1] for row in operation.tokens])
    plain = {**PLAIN, "sequences": 0, "reuse": False} if isinstance(operation, structs.PeakOp) else PLAIN
    for name, value in plain.items():
        if getattr(operation, name, value) != value:
            yield change(operation, **{name: value}, **({"reuse": True} if name == "device_cache" else {}))
    if isinstance(operation, structs.ForkOp) and len(operation.sources) > 1:
        for place in range(len(operation.sources)):
            yield change(operation, sources=operation.sources[:place] + operation.sources[place + 1 :])
    for name in ("least", "remaining", "sequences"):
        value = getattr(operation, name, 0)
        for smaller in sorted({1, value // 2, value - 1}):
            if 0 < smaller < value:
                yield change(operation, **{name: smaller})


def _shorter_prompts(operation: structs.RequestOp) -> Iterator[RtpOp]:
    """Fewer tokens, or all of one token."""
    tokens = operation.tokens
    for length in sorted({1, len(tokens) // 2, len(tokens) - 4, len(tokens) - 1}):
        if 1 <= length < len(tokens):
            yield msgspec.structs.replace(operation, tokens=tokens[:length])
    if len(set(tokens)) > 1:
        yield msgspec.structs.replace(operation, tokens=[min(tokens)] * len(tokens))


def _smaller_headers(header: RtpHeader) -> Iterator[RtpHeader]:
    """A group less, fewer blocks, a switch off."""
    change = msgspec.structs.replace
    apart = len(header.num_blocks) > 1
    for index in range(len(header.groups) if len(header.groups) > 1 else 0):
        groups = header.groups[:index] + header.groups[index + 1 :]
        counts = header.num_blocks[:index] + header.num_blocks[index + 1 :] if apart else header.num_blocks
        yield change(header, groups=groups, num_blocks=counts)
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


RTP_SHRINK_RULES = ShrinkRules(
    _repair,
    headers=_smaller_headers,
    check=to_rtp_config,
    operations=_simpler_operations,
    rewrites=(_with_longer_prompts, _with_equal_tokens),
)
"""Rules by which cases under RTP-LLM's rules are made smaller."""

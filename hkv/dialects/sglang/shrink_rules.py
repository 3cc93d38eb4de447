"""Shrinking of logs under SGLang's rules: what is smaller than a configuration or an operation, what repairs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.case import Best, Candidates, LifecycleRepair, ShrinkRules
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.lifecycle import SGLangLifecycle


def _repair(header: structs.Header) -> LifecycleRepair:
    """Fits chunks to what their request has now."""
    lifecycle = SGLangLifecycle(header)

    def fit(operation: Any) -> Any | None:
        if hasattr(operation, "want"):
            operation = msgspec.structs.replace(operation, want=None)
        request = lifecycle.requests.get(getattr(operation, "id", ""))
        if isinstance(operation, structs.ExtendOp) and request is not None:
            operation = msgspec.structs.replace(operation, length=min(operation.length, request.tokens))
        if isinstance(operation, structs.EvictOp):
            tokens = [*operation.tokens, 0][: len(header.num_blocks)]
            operation = msgspec.structs.replace(operation, tokens=tokens)
        return operation

    return LifecycleRepair(lifecycle, fit)


def _simpler_operations(operation: Any) -> Iterator[Any]:
    """Fewer tokens, or all alike; a shorter chunk; nothing that sets keys apart; less asked for."""
    change = msgspec.structs.replace
    if isinstance(operation, structs.Keyed):
        tokens = operation.tokens
        for length in sorted({1, len(tokens) // 2, len(tokens) - 4, len(tokens) - 1}):
            if 1 <= length < len(tokens):
                yield change(operation, tokens=tokens[:length])
        if len(set(tokens)) > 1:
            yield change(operation, tokens=[min(tokens)] * len(tokens))
        if operation.adapter is not None or operation.salt is not None:
            yield change(operation, adapter=None, salt=None)
    if getattr(operation, "priority", 0):
        yield change(operation, priority=0)
    if getattr(operation, "token", 0):
        yield change(operation, token=0)
    if isinstance(operation, structs.EvictOp):
        for place, count in enumerate(operation.tokens):
            for less in sorted({0, 1, count // 2, count - 1}):
                if 0 <= less < count:
                    yield change(operation, tokens=[*operation.tokens[:place], less, *operation.tokens[place + 1 :]])


def _smaller_headers(header: structs.Header) -> Iterator[structs.Header]:
    """No window or no states, or a smaller window; smaller pages, and fewer; an option at its plainest."""
    change = msgspec.structs.replace
    for place, group in enumerate(header.groups[1:], 1):
        groups, blocks = list(header.groups), list(header.num_blocks)
        del groups[place], blocks[place]
        plain = {"tracked": False, "most_states": -1} if group["kind"] == structs.STATES else {}
        yield change(header, groups=groups, num_blocks=blocks, **plain)
        window = group.get("window", 1)
        for less in sorted({1, window // 2, window - 1}):
            if 1 <= less < window:
                yield change(header, groups=[*header.groups[:place], {**group, "window": less}, *groups[place:]])
    for size in (1, 2):
        if size < header.groups[0]["block_size"]:
            yield change(header, groups=[{**group, "block_size": size} for group in header.groups])
    for place, count in enumerate(header.num_blocks):
        for less in sorted({1, count // 2, count - 4, count - 1}):
            if 1 <= less < count:
                yield change(header, num_blocks=[*header.num_blocks[:place], less, *header.num_blocks[place + 1 :]])
    for name, value in {"policy": "lru", "eagle": False, "need_sort": False, "most_states": -1}.items():
        if getattr(header, name) != value:
            yield change(header, **{name: value})


def _with_equal_tokens(best: Best) -> Candidates:
    """All tokens of the case called 0, 1, 2 and so on; or one of them like another."""
    known = sorted({token for each in best.case.operations for token in _tokens(each)})
    yield _renamed(best, {token: name for name, token in enumerate(known)})
    for token in known[1:]:
        yield _renamed(best, {token: known[0]})


def _tokens(operation: Any) -> list[int]:
    if isinstance(operation, structs.Keyed):
        return operation.tokens
    return [operation.token] if isinstance(operation, structs.DecodeOp) else []


def _renamed(best: Best, names: dict[int, int]) -> tuple[Any, list[Any]]:
    operations = []
    for each in best.case.operations:
        if isinstance(each, structs.Keyed):
            each = msgspec.structs.replace(each, tokens=[names.get(token, token) for token in each.tokens])
        elif isinstance(each, structs.DecodeOp):
            each = msgspec.structs.replace(each, token=names.get(each.token, each.token))
        operations.append(each)
    return best.case.header, operations


SHRINK_RULES = ShrinkRules(
    _repair,
    headers=_smaller_headers,
    check=structs.to_config,
    operations=_simpler_operations,
    rewrites=(_with_equal_tokens,),
)
"""Rules by which cases under SGLang's rules are made smaller."""

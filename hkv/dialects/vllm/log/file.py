"""Logs under vLLM 0.33's rules: what a line must hold beyond its types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hkv.bugs import check_bugs
from hkv.dialects.vllm.log import schema
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import VERSIONS, to_config
from hkv.dialects.vllm.log.structs import Header, Operation
from hkv.errors import FileError
from hkv.oracle.log_format import LARGEST, LogFormat, check_answered
from hkv.spec import CLASSES

COUNTS = (
    "new",
    "hit",
    "lookahead",
    "external",
    "reserved",
    "in_flight",
    "shared_prefix",
    "tokens",
    "limit",
    "keep",
    "prompt",
    "encoder",
)
"""Fields of operations that are numbers of tokens or blocks."""

EVENT_TYPES = ("stored", "removed", "cleared")

OPERATIONS: tuple[type[Any], ...] = (
    oplog.StepOp,
    oplog.RequestOp,
    oplog.LookupOp,
    oplog.ConnectorLookupOp,
    oplog.TruncateOp,
    oplog.AllocateOp,
    oplog.AdvanceOp,
    oplog.ComputedOp,
    oplog.AppendOp,
    oplog.ResumeOp,
    oplog.CommitOp,
    oplog.RetireOp,
    oplog.FreeOp,
    oplog.PopOp,
    oplog.ReleaseOp,
    oplog.HoldOp,
    oplog.DropOp,
    oplog.EvictOp,
    oplog.CopiesOp,
    oplog.ZerosOp,
    oplog.UnwrittenOp,
    oplog.OffloadsOp,
    oplog.FinalizeOp,
    oplog.ResetOp,
    oplog.EventsOp,
    oplog.StateOp,
    oplog.DigestOp,
    oplog.EndOp,
)
"""The operations."""


class VllmLogFormat(LogFormat):
    """The format of logs under vLLM 0.33's rules."""

    def parse_header(self, line: bytes, found: dict[str, Any], path: str) -> Header:
        if "oplog" not in found:
            raise FileError(path, 1, "oplog", None, f"a header with the version, one of {VERSIONS}")
        if type(found["oplog"]) is not int or found["oplog"] not in VERSIONS:
            raise FileError(path, 1, "oplog", found["oplog"], f"one of the versions {VERSIONS}")
        return super().parse_header(line, found, path)

    def check_header(self, header: Header, path: str) -> None:
        for index, group in enumerate(header.groups):
            for name, value in group.items():
                _check_group_field(f"groups[{index}].{name}", name, value, path)
        for name in Header.__struct_fields__:
            value = getattr(header, name)
            if type(value) is int and value > LARGEST:
                raise FileError(path, 1, name, value, f"at most {LARGEST}")
        if not header.feature:
            raise FileError(path, 1, "feature", header.feature, "what the log is about, in a word")
        if not header.groups:
            raise FileError(path, 1, "groups", header.groups, "at least one group")

    def check_operation(
        self, operation: Operation, found: dict[str, Any], path: str, number: int, header: Header
    ) -> None:
        if header.oplog < 3:
            _check_not_live(operation, path, number)
        if header.oplog < 4 and isinstance(operation, oplog.CONNECTOR_OPERATIONS):
            raise FileError(path, number, "op", operation.__struct_config__.tag, "version 4 of the log format")
        for field, value in _numbers(operation):
            signed = header.oplog >= 3 and field == "tokens" and isinstance(getattr(operation, field), list)
            least = -LARGEST - 1 if signed else 0
            if not least <= value <= LARGEST:
                raise FileError(path, number, field, value, f"from {least} to {LARGEST}")
        check_answered(operation, path, number)
        if isinstance(operation, oplog.EventsOp):
            _check_events(operation, path, number, header.oplog)
        if header.oplog == 1 and isinstance(operation, oplog.RequestOp) and operation.extra is not None:
            raise FileError(path, number, "extra", found["extra"], "version 2 of the log format")

    def schema(self) -> dict[str, Any]:
        return schema.complete(super().schema())

    def encode_answer(self, answer: Any) -> Any:
        """An answer as JSON values, with the fields of events that logs always spell out."""
        if isinstance(answer, list) and answer and isinstance(answer[0], oplog.CacheEvent):
            return [_encode_event(event) for event in answer if isinstance(event, oplog.CacheEvent)]
        return msgspec.to_builtins(answer)


def _check_not_live(operation: Operation, path: str, number: int) -> None:
    if isinstance(operation, oplog.LIVE_OPERATIONS):
        name = operation.__struct_config__.tag
        raise FileError(path, number, "op", name, "version 3 of the log format")
    for field in oplog.LIVE_FIELDS:
        if getattr(operation, field, None):
            raise FileError(path, number, field, getattr(operation, field), "version 3 of the log format")


def _allowed(header: Header) -> None:
    check_bugs(frozenset(header.bugs))
    to_config(header)


FORMAT = VllmLogFormat(Header, OPERATIONS, _allowed)
"""Header and operations, by name."""


def _encode_event(event: oplog.CacheEvent) -> dict[str, Any]:
    if event.type == "cleared":
        return {"type": event.type}
    fields = {"type": event.type, "group": event.group, "num_blocks": event.num_blocks}
    return {**fields, **msgspec.to_builtins(event)}


SWITCHES = {"cp_sharded", *(cls.log_variant for cls in CLASSES.values() if cls.log_variant)}
"""Fields of groups that are true or false."""


def _check_group_field(field: str, name: str, value: object, path: str) -> None:
    if name in ("kind", "cache_mode"):
        good, expected = isinstance(value, str), f"the name of a {'kind' if name == 'kind' else 'mode'}"
    elif name in SWITCHES:
        good, expected = isinstance(value, bool), "true or false"
    else:
        good = value is None or (type(value) is int and 0 <= value <= LARGEST)
        expected = f"null or an integer from 0 to {LARGEST}"
    if not good:
        raise FileError(path, 1, field, value, expected)


def _check_events(operation: oplog.EventsOp, path: str, number: int, version: int) -> None:
    types = EVENT_TYPES if version > 1 else EVENT_TYPES[:2]
    for index, event in enumerate(operation.want or ()):
        field = f"want[{index}]"
        if event.type not in types:
            raise FileError(path, number, f"{field}.type", event.type, f"one of {', '.join(types)}")
        for name in oplog.EVENT_FIELDS[(0, 2, len(oplog.EVENT_FIELDS))[min(version, 3) - 1] :]:
            if getattr(event, name) is not None:
                least = 2 if name in oplog.EVENT_FIELDS[:2] else 3
                expected = f"version {least} of the log format"
                raise FileError(path, number, f"{field}.{name}", getattr(event, name), expected)


def _numbers(operation: Operation) -> Iterable[tuple[str, int]]:
    for field in type(operation).__struct_fields__:
        value = getattr(operation, field)
        if field in COUNTS and type(value) is int:
            yield field, value
        elif field in ("tokens", "blocks") and isinstance(value, list) and value:
            yield field, min(value)
            yield field, max(value)

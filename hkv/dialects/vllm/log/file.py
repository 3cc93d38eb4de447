"""Logs under vLLM 0.33's rules: what a line must hold beyond its types."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from hkv.contract.bugs import check_bugs
from hkv.contract.log import LARGEST, LogFormat, check_answered
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import VERSIONS, to_config
from hkv.dialects.vllm.log.structs import (
    CONNECTOR_OPERATIONS,
    EVENT_FIELDS,
    LIVE_FIELDS,
    LIVE_OPERATIONS,
    Header,
    Operation,
)
from hkv.errors import FileError
from hkv.keys.chained import GIVEN, SEED
from hkv.limits import MAX_TOKENS
from hkv.spec import CLASSES, KINDS, LayerSpec, log_variants

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
        return complete(super().schema())

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
    check_bugs(header.bugs, BUGS)
    to_config(header)


FORMAT = VllmLogFormat(Header, OPERATIONS, _allowed)
"""Header and operations, by name."""


def _encode_event(event: oplog.CacheEvent) -> dict[str, Any]:
    if event.type == "cleared":
        return {"type": event.type}
    fields = {"type": event.type, "group": event.group, "num_blocks": event.num_blocks}
    return {**fields, **msgspec.to_builtins(event)}


SWITCHES = {"cp_sharded", *(cls.written.variant for cls in CLASSES.values() if cls.written.variant)}
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


# Additions to the JSON schema of vLLM's logs beyond the structs: kinds of groups, events by type, and versions.

MODES = ["align", "none"]
"""Values that a field of text may have."""

LATER_KINDS = {"properties": {"kind": {"enum": ["mla", "opaque"]}}, "required": ["kind"]}

LATER_GROUPS = {"anyOf": [LATER_KINDS, {"required": ["cache_mode"]}]}
"""Groups that version 1 does not know."""

LIVE_EVENTS = {"anyOf": [{"required": [name]} for name in EVENT_FIELDS[2:]]}
"""Events that versions before 3 do not know."""

LIVE = {
    "anyOf": [
        {"properties": {"op": {"enum": [str(each.__struct_config__.tag) for each in LIVE_OPERATIONS]}}},
        *(
            {"required": [name], "properties": {name: {"not": {"enum": [None, False, []]}}}}
            for name in LIVE_FIELDS[:-1]
        ),
        {"properties": {"op": {"const": "copies"}, "hold": {"const": True}}, "required": ["hold"]},
        {
            "properties": {"op": {"enum": ["request", "append"]}, "tokens": {"contains": {"maximum": -1}}},
            "required": ["op", "tokens"],
        },
        {"properties": {"op": {"const": "events"}, "want": {"contains": LIVE_EVENTS}}, "required": ["op", "want"]},
    ]
}
"""Operations that versions before 3 do not know."""

CONNECTOR = {"properties": {"op": {"enum": [str(each.__struct_config__.tag) for each in CONNECTOR_OPERATIONS]}}}
"""Operations that versions before 4 do not know."""

LATER_EVENTS = {
    "anyOf": [{"required": ["keys"]}, {"required": ["parent"]}, {"properties": {"type": {"const": "cleared"}}}]
}
"""Events that version 1 does not know."""

EVENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stored": (("group", "num_blocks", "block_size", "tokens"), EVENT_FIELDS),
    "removed": (("group", "num_blocks"), ("keys", "medium")),
    "cleared": ((), ()),
}
"""Fields that an event of each type must have, and those that it may have."""


def complete(definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions that structs give, with what they do not say; `operation_1` is a line of version 1."""
    forms = {kind: _group(spec) for kind, spec in KINDS.items()}
    old = {"watermark": {"const": 0}, "shared_prefix_checkpoint": {"const": False}, "bugs": {"maxItems": 0}}
    old["groups"] = {"items": {"not": LATER_GROUPS}}
    older = {"hash": {"not": {"const": GIVEN}}, "hash_seed": {"const": SEED}, "zeroing": {"const": False}}
    older["offloads"] = {"const": False}
    older["groups"] = {"items": {"not": {"anyOf": [{"required": [name]} for name in _later_fields()]}}}
    return {
        **definitions,
        **forms,
        "group": {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in forms]},
        "CacheEvent": _events(definitions["CacheEvent"]),
        "header": {
            **definitions["header"],
            "allOf": [
                {"if": {"properties": {"oplog": {"const": 1}}}, "then": {"properties": old}},
                {"if": {"properties": {"oplog": {"maximum": 2}}}, "then": {"properties": older}},
            ],
        },
        "operation_3": {"allOf": [{"$ref": "#/$defs/operation"}, {"not": CONNECTOR}]},
        "operation_2": {"allOf": [{"$ref": "#/$defs/operation_3"}, {"not": LIVE}]},
        "operation_1": {
            "allOf": [{"$ref": "#/$defs/operation_2"}, {"not": {"required": ["extra"]}}],
            "if": {"properties": {"op": {"const": "events"}}},
            "then": {"properties": {"want": {"items": {"not": LATER_EVENTS}}}},
        },
    }


def _later_fields() -> list[str]:
    """Fields of groups that version 3 added."""
    variants = {variant.written.variant for spec in KINDS.values() for variant in log_variants(spec)}
    return sorted(variants.union(*(kinds.of_kind(kind).later_log_fields for kind in KINDS)))


def _events(struct: dict[str, Any]) -> dict[str, Any]:
    """One form for each type, of the fields that the struct has for all."""
    forms = []
    for name, (required, optional) in EVENTS.items():
        fields = {field: _given(struct["properties"][field]) for field in (*required, *optional)}
        forms.append(_object({"type": {"const": name}, **fields}, ["type", *required]))
    return {"description": struct["description"], "oneOf": forms}


def _given(field: dict[str, Any]) -> dict[str, Any]:
    """A field where it must be there and is not null."""
    field = {name: value for name, value in field.items() if name != "default"}
    forms = [form for form in field.get("anyOf", ()) if form != {"type": "null"}]
    return forms[0] if forms else field


def _group(spec: type[LayerSpec]) -> dict[str, Any]:
    """An entry of `groups`: the kind, its block size, and the fields that it says logs have."""
    hints = typing.get_type_hints(spec)
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    names = ("block_size", *spec.written.fields)
    fields = {name: _value(hints[name], defaults[name]) for name in names}
    fields |= {variant.written.variant: {"type": "boolean"} for variant in log_variants(spec)}
    required = [name for name in names if defaults[name] is dataclasses.MISSING]
    return _object({"kind": {"const": spec.kind}, **fields}, ["kind", *required])


def _value(hint: Any, default: object) -> dict[str, Any]:
    """A number is positive, unless 0 is what it is when it is left out."""
    positive = {"type": "integer", "minimum": int(default != 0), "maximum": MAX_TOKENS}
    if hint == int | None:
        return {"anyOf": [positive, {"type": "null"}]}
    return {int: positive, bool: {"type": "boolean"}, str: {"enum": MODES}}[hint]


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

"""Logs under vLLM 0.33's rules: what a line must hold beyond its types, and the configuration that a header is.

Structs say what fields there are and since which version; the checks here, and the JSON schema, are made from that.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from hkv.contract.bugs import check_bugs
from hkv.contract.log import LARGEST, LogFormat, later_fields
from hkv.dialects.vllm import config as vllm
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import EVENT_FIELDS, OPERATIONS, Header, Operation
from hkv.errors import ConfigError, FileError
from hkv.keys.chained import GIVEN
from hkv.limits import MAX_TOKENS
from hkv.model.topology import Topology
from hkv.spec import CLASSES, KINDS, LayerSpec, log_variants, spec_from_log, spec_to_log

VERSIONS = (1, 2, 3, 4)

_SAME = sorted(set(Header.__struct_fields__) & {field.name for field in dataclasses.fields(vllm.VllmConfig)} - {"bugs"})
"""Fields that a header and a configuration have alike."""


def to_config(header: Header) -> vllm.VllmConfig:
    """The configuration that a header describes.

    Raises:
      HKVError: unknown version or dialect, or a configuration that the dialect forbids.
    """
    if header.oplog not in VERSIONS:
        raise ConfigError("oplog", header.oplog, f"one of the versions {VERSIONS}")
    if header.dialect not in vllm.NAMES:
        raise ConfigError("dialect", header.dialect, " or ".join(vllm.NAMES))
    _check_version(header)
    specs = [spec_from_log(group) for group in header.groups]
    fields = {name: getattr(header, name) for name in _SAME}
    topology = Topology.of_specs(specs, header.eagle_groups)
    return vllm.VllmConfig(topology=topology, bugs=frozenset(header.bugs), **fields)


def to_header(config: vllm.VllmConfig, feature: str, version: int = 2) -> Header:
    """The header that describes a configuration, as recorded logs write it."""
    return Header(
        oplog=version,
        feature=feature,
        groups=[_entry(spec, version) for spec in config.topology.specs],
        eagle_groups=list(config.topology.eagle_groups),
        bugs=sorted(config.bugs),
        **{name: getattr(config, name) for name in _SAME},
    )


def _entry(spec: LayerSpec, version: int) -> dict[str, Any]:
    entry = spec_to_log(spec)
    if version == 1 and entry.get("cache_mode") == "align":
        del entry["cache_mode"]
    return entry


def _check_version(header: Header) -> None:
    """Makes sure that a header says nothing that its version of the format does not know."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(Header)}
    later = [(name, since) for name, since in later_fields(Header) if getattr(header, name) not in (defaults[name], [])]
    for name, since in [*later, *([("hash", 3)] if header.hash == GIVEN else [])]:
        if header.oplog < since:
            raise ConfigError(name, getattr(header, name), f"version {since} of the log format")
    for group in header.groups:
        if group.get("kind") not in KINDS:
            continue
        for name, since in {"kind": kinds.of_kind(group["kind"]).log_version, **_later_fields(group["kind"])}.items():
            if name in group and header.oplog < since:
                raise ConfigError(name, group[name], f"version {since} of the log format")


def _later_fields(kind: str) -> dict[str, int]:
    """Fields of a kind's groups that a later version added, and that version."""
    layer = kinds.of_kind(kind)
    variants = dict.fromkeys((cls.written.variant for cls in log_variants(layer.of)), 3)
    return {"cache_mode": 2, **variants, **layer.later_log_fields}


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
        if not header.groups:
            raise FileError(path, 1, "groups", header.groups, "at least one group")

    def check_operation(
        self, operation: Operation, found: dict[str, Any], path: str, number: int, header: Header
    ) -> None:
        _check_known(operation, found, path, number, header.oplog)
        for field, value in _numbers(operation):
            signed = header.oplog >= 3 and field == "tokens" and isinstance(getattr(operation, field), list)
            least = -LARGEST - 1 if signed else 0
            if not least <= value <= LARGEST:
                raise FileError(path, number, field, value, f"from {least} to {LARGEST}")
        if isinstance(operation, oplog.EventsOp):
            _check_events(operation, path, number, header.oplog)

    def schema(self) -> dict[str, Any]:
        return complete(super().schema())

    def encode_answer(self, answer: Any) -> Any:
        """An answer as JSON values, with the fields of events that logs always spell out."""
        if isinstance(answer, list) and answer and isinstance(answer[0], oplog.CacheEvent):
            return [_encode_event(event) for event in answer if isinstance(event, oplog.CacheEvent)]
        return msgspec.to_builtins(answer)


def _check_known(operation: Operation, found: dict[str, Any], path: str, number: int, version: int) -> None:
    """Makes sure that a version of the format knows an operation and its fields."""
    if operation.since > version:
        raise FileError(path, number, "op", found["op"], f"version {operation.since} of the log format")
    for name, since in later_fields(type(operation)):
        if since > version and getattr(operation, name):
            raise FileError(path, number, name, found[name], f"version {since} of the log format")


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
    types = ("stored", "removed", "cleared")[: 3 if version > 1 else 2]
    for index, event in enumerate(operation.want or ()):
        field = f"want[{index}]"
        if event.type not in types:
            raise FileError(path, number, f"{field}.type", event.type, f"one of {', '.join(types)}")
        for name, since in later_fields(oplog.CacheEvent):
            if since > version and getattr(event, name) is not None:
                expected = f"version {since} of the log format"
                raise FileError(path, number, f"{field}.{name}", getattr(event, name), expected)


def _numbers(operation: Operation) -> Iterable[tuple[str, int]]:
    for field in type(operation).__struct_fields__:
        value = getattr(operation, field)
        if type(value) is int:
            yield field, value
        elif field in ("tokens", "blocks") and isinstance(value, list) and value:
            yield field, min(value)
            yield field, max(value)


# Additions to the JSON schema of vLLM's logs beyond the structs: kinds of groups, events by type, and versions.


EVENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stored": (("group", "num_blocks", "block_size", "tokens"), EVENT_FIELDS),
    "removed": (("group", "num_blocks"), ("keys", "medium")),
    "cleared": ((), ()),
}
"""Fields that an event of each type must have, and those that it may have."""


def complete(definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions that structs give, with what they do not say; `operation_1` is a line of version 1."""
    forms = {kind: _group(spec) for kind, spec in KINDS.items()}
    known = {version: f"operation_{version}" for version in VERSIONS} | {VERSIONS[-1]: "operation"}
    earlier = [
        {"if": {"properties": {"oplog": {"maximum": version - 1}}}, "then": {"properties": _header_before(version)}}
        for version in (2, 3)
    ]
    return {
        **definitions,
        **forms,
        "group": {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in forms]},
        "CacheEvent": _events(definitions["CacheEvent"]),
        "header": {**definitions["header"], "allOf": earlier},
        **{
            known[version - 1]: {"allOf": [{"$ref": f"#/$defs/{known[version]}"}, {"not": _added(version)}]}
            for version in reversed(VERSIONS[1:])
        },
    }


def _header_before(version: int) -> dict[str, Any]:
    """Fields of headers of earlier versions, as far as this one adds fields, kinds of groups and fields of these."""
    added = {name for name, since in later_fields(Header) if since == version}
    unused: dict[str, Any] = {"hash": {"not": {"const": GIVEN}}} if version == 3 else {}
    for field in msgspec.structs.fields(Header):
        if field.name in added:
            unused[field.name] = {"maxItems": 0} if field.default is msgspec.NODEFAULT else {"const": field.default}
    new = [kind for kind in KINDS if kinds.of_kind(kind).log_version == version]
    later = {name for kind in KINDS for name, since in _later_fields(kind).items() if since == version}
    groups: list[dict[str, Any]] = [{"properties": {"kind": {"enum": new}}, "required": ["kind"]}]
    groups += [{"required": [name]} for name in sorted(later)]
    return {**unused, "groups": {"items": {"not": {"anyOf": groups}}}}


def _added(version: int) -> dict[str, Any]:
    """Operations that versions before this one do not know: new ones, and such as have new fields, tokens or events."""
    tags = [str(each.__struct_config__.tag) for each in OPERATIONS if each.since == version]
    fields = dict.fromkeys(name for each in OPERATIONS for name, since in later_fields(each) if since == version)
    events: list[dict[str, Any]] = [
        {"required": [name]} for name, since in later_fields(oplog.CacheEvent) if since == version
    ]
    forms: list[dict[str, Any]] = [{"properties": {"op": {"enum": tags}}}]
    forms += [{"required": [name], "properties": {name: {"not": {"enum": [None, False, []]}}}} for name in fields]
    if version == 2:
        events.append({"properties": {"type": {"const": "cleared"}}})
    if version == 3:
        negative = {"op": {"enum": ["request", "append"]}, "tokens": {"contains": {"maximum": -1}}}
        forms.append({"properties": negative, "required": ["op", "tokens"]})
    if events:
        told = {"op": {"const": "events"}, "want": {"contains": {"anyOf": events}}}
        forms.append({"properties": told, "required": ["op", "want"]})
    return {"anyOf": forms}


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
    return {int: positive, bool: {"type": "boolean"}, str: {"enum": ["align", "none"]}}[hint]


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

"""Additions to the JSON schema of vLLM's logs beyond the structs: kinds of groups, events by type, and versions."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from hkv.dialects.vllm.log.structs import CONNECTOR_OPERATIONS, EVENT_FIELDS, LIVE_FIELDS, LIVE_OPERATIONS
from hkv.keys.chained import GIVEN, SEED
from hkv.limits import MAX_TOKENS
from hkv.spec import KINDS, LayerSpec, log_variants

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
    kinds = {kind: _group(spec) for kind, spec in KINDS.items()}
    old = {"watermark": {"const": 0}, "shared_prefix_checkpoint": {"const": False}, "bugs": {"maxItems": 0}}
    old["groups"] = {"items": {"not": LATER_GROUPS}}
    older = {"hash": {"not": {"const": GIVEN}}, "hash_seed": {"const": SEED}, "zeroing": {"const": False}}
    older["offloads"] = {"const": False}
    older["groups"] = {"items": {"not": {"anyOf": [{"required": [name]} for name in _later_fields()]}}}
    return {
        **definitions,
        **kinds,
        "group": {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]},
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
    variants = {variant.log_variant for spec in KINDS.values() for variant in log_variants(spec)}
    return sorted(variants.union(*(spec.later_log_fields for spec in KINDS.values())))


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
    names = ("block_size", *spec.log_fields)
    fields = {name: _value(hints[name], defaults[name]) for name in names}
    fields |= {variant.log_variant: {"type": "boolean"} for variant in log_variants(spec)}
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

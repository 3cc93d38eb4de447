"""Layers as they are written, in a log's header and on the command line, by what their class says (`Written`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, cast

from hkv.errors import SpecError
from hkv.limits import whole_number
from hkv.spec.attention import KernelPages
from hkv.spec.layer import CLASSES, KINDS, LayerSpec


def spec_from_log(fields: Mapping[str, Any]) -> LayerSpec:
    """The layer that one entry of a log header's `groups` describes.

    Args:
      fields: `kind`, `block_size` and exactly the kind's `log_fields`; a field with a default may be absent.

    Raises:
      SpecError: unknown kind, unknown or missing field, impossible value.
    """
    kind = fields.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise SpecError("kind", kind, f"one of {', '.join(sorted(KINDS))}")
    rest = {name: value for name, value in fields.items() if name != "kind"}
    for variant in log_variants(cls):
        marked = rest.pop(variant.written.variant, False)
        if type(marked) is not bool:
            raise SpecError(variant.written.variant, marked, "true or false")
        cls = variant if marked else cls
    allowed, required = _log_fields(cls)
    if unknown := sorted(rest.keys() - allowed):
        raise SpecError(unknown[0], rest[unknown[0]], f"a field of {kind}: {', '.join(sorted(allowed))}")
    if missing := sorted(required - rest.keys()):
        raise SpecError(missing[0], None, f"to be given for {kind}")
    return cls(**rest)


@functools.cache
def _log_fields(cls: type[LayerSpec]) -> tuple[frozenset[str], frozenset[str]]:
    """Fields of a class in logs, all and those without a default."""
    allowed = frozenset({"block_size", *cls.written.fields})
    needed = (field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING)
    return allowed, allowed & frozenset(needed)


def spec_to_log(spec: LayerSpec) -> dict[str, Any]:
    """A layer as a log's header writes it."""
    fields = {name: getattr(spec, name) for name in spec.written.fields}
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    left_out = {name for name in spec.written.seldom if fields[name] == defaults[name]}
    given = {name: value for name, value in fields.items() if name not in left_out}
    return {"kind": spec.kind, "block_size": spec.block_size, **given}


def spec_to_text(spec: LayerSpec) -> str:
    """A layer as the command line writes it, e.g. `swa:16:1024`; geometry is left out."""
    numbers = (getattr(spec, name) for name in ("block_size", *spec.written.parameters))
    return ":".join(map(str, (spec.written.short_name, *numbers)))


def log_variants(cls: type[LayerSpec]) -> tuple[type[LayerSpec], ...]:
    """Classes that logs tell from a kind's own by a field of theirs."""
    return tuple(other for other in CLASSES.values() if other.written.variant and other.kind == cls.kind)


def text_forms() -> tuple[str, ...]:
    """Forms of a layer of each kind on the command line, in the order of their names."""
    return tuple(sorted(cls.written.text for cls in KINDS.values() if cls.written.short_name))


def spec_from_text(text: str) -> LayerSpec:
    """The layer that a text describes as the command line writes it (`Written.text`), e.g. `swa:16:1024`.

    Raises:
      SpecError: unknown kind, a part that is not a positive integer, a missing or superfluous part.
    """
    names = {cls.written.short_name: cls for cls in KINDS.values() if cls.written.short_name}
    kind, *numbers = text.split(":")
    cls = names.get(kind)
    if cls is None:
        raise SpecError("group", text, f"one of {', '.join(text_forms())}")
    wanted = ("block_size", *cls.written.parameters)
    found = [whole_number(part) for part in numbers]
    if len(found) != len(wanted) or not all(found):
        raise SpecError("group", text, f"{cls.written.text}, each number a positive integer")
    values: dict[str, Any] = dict(zip(wanted, found, strict=True))
    return cls(**values)


# Layers as plain values, for files that outlive a version of the code.


def spec_record(spec: LayerSpec) -> dict[str, Any]:
    """A layer as plain values: its class, and every field that is not at its default."""
    record: dict[str, Any] = {"class": type(spec).__name__}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            record[field.name] = _plain(value)
    return record


def spec_of(record: Mapping[str, Any]) -> LayerSpec:
    """The layer of a record.

    Raises:
      SpecError: unknown class or field, impossible value.
    """
    fields: dict[str, Any] = dict(record)
    cls = CLASSES.get(fields.pop("class", None))
    if cls is None:
        raise SpecError("class", record.get("class"), f"one of {', '.join(sorted(CLASSES))}")
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(fields.keys() - known):
        raise SpecError(unknown[0], fields[unknown[0]], f"a field of {cls.__name__}")
    for name in ("shapes", "dtypes"):
        if name in fields:
            fields[name] = tuple(_tuple(value) for value in fields[name])
    if isinstance(fields.get("tokens_per_state"), list):
        fields["tokens_per_state"] = Fraction(*fields["tokens_per_state"])
    if isinstance(fields.get("block_stride_alignment"), dict):
        fields["block_stride_alignment"] = KernelPages(**fields["block_stride_alignment"])
    return cls(**fields)


def _tuple(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, KernelPages):
        return {"tokens": value.tokens}
    if isinstance(value, Fraction):
        return [value.numerator, value.denominator]
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return value

"""Layers as plain values, for files that outlive a version of the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, cast

from hkv.errors import SpecError
from hkv.spec import CLASSES, KernelPages, LayerSpec


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

"""Layers as they are written: in a log's header, and on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.errors import SpecError
from hkv.limits import whole_number
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
        marked = rest.pop(variant.log_variant, False)
        if type(marked) is not bool:
            raise SpecError(variant.log_variant, marked, "true or false")
        cls = variant if marked else cls
    allowed = {"block_size", *cls.log_fields}
    if unknown := sorted(set(rest) - allowed):
        raise SpecError(unknown[0], rest[unknown[0]], f"a field of {kind}: {', '.join(sorted(allowed))}")
    required = {f.name for f in dataclasses.fields(cls) if f.name in allowed and f.default is dataclasses.MISSING}
    if missing := sorted(required - set(rest)):
        raise SpecError(missing[0], None, f"to be given for {kind}")
    return cls(**rest)


def log_variants(cls: type[LayerSpec]) -> tuple[type[LayerSpec], ...]:
    """Classes that logs tell from a kind's own by a field of theirs."""
    return tuple(other for other in CLASSES.values() if other.log_variant and other.kind == cls.kind)


def text_forms() -> tuple[str, ...]:
    """Forms of a layer of each kind on the command line, in the order of their names."""
    return tuple(sorted(cls.text_form() for cls in KINDS.values() if cls.short_name))


def spec_from_text(text: str) -> LayerSpec:
    """The layer that a text describes as the command line writes it (`LayerSpec.text_form`), e.g. `swa:16:1024`.

    Raises:
      SpecError: unknown kind, a part that is not a positive integer, a missing or superfluous part.
    """
    names = {cls.short_name: cls for cls in KINDS.values() if cls.short_name}
    kind, *numbers = text.split(":")
    cls = names.get(kind)
    if cls is None:
        raise SpecError("group", text, f"one of {', '.join(text_forms())}")
    wanted = ("block_size", *cls.parameters)
    found = [whole_number(part) for part in numbers]
    if len(found) != len(wanted) or not all(found):
        raise SpecError("group", text, f"{cls.text_form()}, each number a positive integer")
    values: dict[str, Any] = dict(zip(wanted, found, strict=True))
    return cls(**values)

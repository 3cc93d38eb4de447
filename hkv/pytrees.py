"""Dataclasses as pytrees that exported programs can name: `jax.export.export(f)(...).serialize()` over them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any, TypeVar

import jax
import jax.export

T = TypeVar("T")


def pytree(*static: type) -> Callable[[type[T]], type[T]]:
    """Registers a dataclass as `jax.tree_util.register_dataclass` does, and for serialization as `hkv.NAME`.

    Args:
      static: the classes, dataclasses and enums, that values of its static fields are made of, besides tuples, numbers,
        strings and None: a serialized program makes no others.
    """
    known = {each.__name__: each for each in static}

    def registered(cls: type[T]) -> type[T]:
        jax.tree_util.register_dataclass(cls)
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"hkv.{cls.__name__}",
            serialize_auxdata=lambda static: json.dumps(_plain(static)).encode(),
            deserialize_auxdata=lambda text: _made(known, json.loads(text)),
        )
        return cls

    return registered


def _plain(value: Any) -> Any:
    """A static value in JSON's terms: whatever is no number or string in an object under its class's name."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if isinstance(value, Fraction):
        return {"Fraction": str(value)}
    if dataclasses.is_dataclass(value):
        return {
            type(value).__name__: {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        }
    return value


def _made(known: Mapping[str, type], value: Any) -> Any:
    """The inverse of `_plain`, of the classes that are known."""
    made = functools.partial(_made, known)
    if isinstance(value, list):
        return tuple(map(made, value))
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "Fraction":
        return Fraction(content)
    if isinstance(content, dict):
        return known[name](**{field: made(each) for field, each in content.items()})
    return known[name](content)

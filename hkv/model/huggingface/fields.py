"""A `config.json` that remembers which field every value came from, and which were not in the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.family import REQUIRED, Family

MOST_LAYERS = 10_000
"""More layers than that are a slip of the pen."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A number, and the fields of the config that decide it, as paths from the top of the file."""

    value: int
    names: tuple[str, ...]

    def times(self, other: Field | int) -> Field:
        """The product."""
        if isinstance(other, int):
            return Field(self.value * other, self.names)
        return Field(self.value * other.value, (*self.names, *other.names))

    def plus(self, other: Field) -> Field:
        """The sum."""
        return Field(self.value + other.value, (*self.names, *other.names))

    def over(self, other: Field) -> Field:
        """The quotient, rounded down."""
        if self.value < other.value:
            raise ConfigError(" / ".join((*self.names, *other.names)), self.value, f"at least {other.value}")
        return Field(self.value // other.value, (*self.names, *other.names))


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields that describe a decoder. A value of another type than is asked for is a ConfigError that names it.

    `outer` are the fields around them, where a multimodal config nests the decoder's under `path`, e.g. `text_config.`;
    `notes` have a line for each default that was used, in order of use.
    """

    values: Mapping[str, Any]
    model_type: str
    family: Family
    outer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: str = ""
    notes: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def place(self, name: str) -> str:
        """The path of a field in the file, under the name that the file has for it."""
        for other, meant in self.family.spellings.items():
            if meant == name and other in self.values and name not in self.values:
                return self.path + other
        return self.path + name

    def given(self, name: str) -> bool:
        """True if the file has the field, under any of its names, and not as null."""
        names = (name, *(other for other, meant in self.family.spellings.items() if meant == name))
        return any(self.values.get(one) is not None for one in names)

    def raw(self, name: str) -> Any:
        """The value of a deciding field; the family's default, which is noted, if it is not in the file."""
        for other in (name, *(other for other, meant in self.family.spellings.items() if meant == name)):
            if other in self.values:
                return self.values[other]
        default = self.family.fields[name]
        if default is REQUIRED:
            raise ConfigError(self.path + name, None, f"a value: {self.family.name} has no default for it")
        if default is not None:
            self.notes[name] = f"{name} = {show(default)}, {self.family.name}'s default: not in the file"
        return default

    def has(self, name: str) -> bool:
        """True if the family has the field and its value is not null."""
        return name in self.family.fields and self.raw(name) is not None

    def integer(self, name: str) -> Field:
        """A positive integer."""
        field = self.optional(name)
        if field is None:
            raise ConfigError(self.place(name), None, "a positive integer: the layers' bytes depend on it")
        return field

    def optional(self, name: str) -> Field | None:
        """A positive integer, or None where it is null."""
        value = self.raw(name)
        if value is None:
            return None
        check_whole(self.place(name), value, 1, MAX_TOKENS)
        return Field(value, (self.place(name),))

    def count(self, name: str) -> int:
        """An integer that may be 0; null is 0."""
        value = self.raw(name)
        if value is None:
            return 0
        check_whole(self.place(name), value, 0, MAX_TOKENS)
        return value

    def flag(self, name: str) -> bool:
        """A truth value; null is false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(self.place(name), value, "true or false")
        return bool(value)

    def names(
        self, name: str, known: Mapping[str, str] | None = None, lengths: tuple[int, ...] = ()
    ) -> list[tuple[str, str]] | None:
        """`(type, field)` of each layer from a list in the file, or None where it is null or missing.

        `known` maps each name of a type to its meaning; `lengths` are allowed numbers of entries besides
        `num_hidden_layers`.
        """
        value = self._listed(name, lambda kind: isinstance(kind, str), "a list of names of layer types")
        if value is None:
            return None
        if len(value) not in lengths:
            self._check_length(name, len(value))
        found = [(kind, f"{self.place(name)}[{i}]") for i, kind in enumerate(value)]
        if known is None:
            return found
        for kind, place in found:
            if kind not in known:
                raise ConfigError(place, kind, f"one of {', '.join(sorted(known))}")
        return [(known[kind], place) for kind, place in found]

    def flags(self, name: str) -> list[tuple[bool, str]] | None:
        """`(flag, field)` of each layer from a list of 0 and 1, or None where it is null or missing."""
        value = self._listed(name, lambda flag: type(flag) in (int, bool) and flag in (0, 1), "a list of 0 and 1")
        if value is None:
            return None
        self._check_length(name, len(value))
        return [(bool(flag), f"{self.place(name)}[{i}]") for i, flag in enumerate(value)]

    def integers(self, name: str, least: int = 0) -> list[Field] | None:
        """A list of integers, or None where it is null or missing."""
        value = self._listed(name, lambda _: True, "a list of integers")
        if value is None:
            return None
        for index, entry in enumerate(value):
            check_whole(f"{self.place(name)}[{index}]", entry, least, MAX_TOKENS)
        return [Field(entry, (f"{self.place(name)}[{i}]",)) for i, entry in enumerate(value)]

    def _listed(self, name: str, right: Callable[[Any], bool], expected: str) -> Sequence[Any] | None:
        value = self.raw(name)
        if value is not None and not (isinstance(value, list | tuple) and all(map(right, value))):
            raise ConfigError(self.place(name), value, expected)
        return value

    def nested(self, name: str) -> Mapping[str, Any]:
        """An object inside the config, empty where it is null."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(self.place(name), value, "an object")
        return value

    def inside(self, name: str, part: str) -> Field | None:
        """A positive integer inside such an object, or None where it is missing."""
        value = self.nested(name).get(part)
        if value is None:
            return None
        place = f"{self.place(name)}.{part}"
        check_whole(place, value, 1, MAX_TOKENS)
        return Field(value, (place,))

    def _check_length(self, name: str, length: int) -> None:
        if "num_hidden_layers" in self.family.fields and length != (layers := self.num_layers):
            raise ConfigError(self.place(name), length, f"{layers} entries, one a layer (num_hidden_layers)")

    @property
    def head_dim(self) -> Field:
        """Elements of one key head: `head_dim`, else what the hidden size leaves for each query head."""
        if "head_dim" in self.family.fields and (size := self.optional("head_dim")) is not None:
            return size
        return self.integer("hidden_size").over(self.integer("num_attention_heads"))

    @property
    def kv_heads(self) -> Field:
        """Key/value heads; as many as query heads where nothing says."""
        if "num_key_value_heads" in self.family.fields and (heads := self.optional("num_key_value_heads")) is not None:
            return heads
        return self.integer("num_attention_heads")

    def derived(self, name: str, field: Field) -> Field:
        """A number that follows from other fields, which is noted, if the file does not have it."""
        if self.family.fields.get(name, REQUIRED) is None and not self.given(name):
            self.notes[name] = f"{name} = {field.value}, from {', '.join(field.names)}: the file has none"
        return field

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        count = self.integer("num_hidden_layers").value
        if count > MOST_LAYERS:
            raise ConfigError(self.place("num_hidden_layers"), count, f"at most {MOST_LAYERS}")
        return count


def show(value: object) -> str:
    """A value as the file would have it."""
    return json.dumps(value, default=str)

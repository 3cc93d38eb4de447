"""Answers of a judge as compact JSON: layers of one description together."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any


def plain(value: Any) -> Any:
    """A field of a vLLM spec as JSON: element types and kinds by name, fractions as pairs."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Fraction):
        return [value.numerator, value.denominator]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value).removeprefix("torch.")


def message(error: BaseException, folder: str = "") -> str:
    """An error's message as one line of at most 300 characters, without names of temporary folders."""
    text = " ".join(str(error).split())
    if folder:
        text = text.replace(folder, "FOLDER").replace(pathlib.Path(folder).name, "FOLDER")
    text = text.split(" [type=")[0].replace(tempfile.gettempdir(), "")
    return text[:300]


def lines_of(table: Mapping[str, Any]) -> str:
    """A table that the package ships, as JSON with a line for each part of a part."""
    parts = []
    for name, part in table.items():
        said = json.dumps(part)
        if isinstance(part, dict):
            said = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) + "\n}"
        parts.append(f"{json.dumps(name)}: {said}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def digest(config: Mapping[str, Any]) -> str:
    """A hash of a config's content, by which a recording of another one is noticed."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def spec_record(spec: Any) -> dict[str, Any]:
    """A vLLM spec: its class, bytes of a page, and each field that is not at the class's default."""
    record = {"kind": type(spec).__name__, "page_bytes": spec.page_size_bytes}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            record[field.name] = plain(value)
    return record


def ranges(numbers: Iterable[int]) -> str:
    """`0-4,6,8-10` of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers(text: str) -> Iterator[int]:
    """The numbers of `ranges`."""
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def split_name(name: str) -> tuple[str, int]:
    """A layer's name with its number left out, and the number: `model.layers.{}.mixer`, 3; -1 if it has none."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if place is None:
        return name, -1
    return ".".join([*parts[:place], "{}", *parts[place + 1 :]]), int(parts[place])


def pack(layers: Mapping[str, Any]) -> list[list[Any]]:
    """Layers by name as `[name with {} for the number, ranges of numbers, description]`, in order of appearance."""
    groups: dict[str, list[Any]] = {}
    for name, description in layers.items():
        pattern, number = split_name(name)
        key = json.dumps([pattern, description], sort_keys=True)
        groups.setdefault(key, [pattern, [], description])[1].append(number)
    return [[pattern, ranges(sorted(found)), description] for pattern, found, description in groups.values()]


def unpack(packed: Iterable[Iterable[Any]]) -> dict[str, Any]:
    """Layers by name, in the order of their numbers; a name without a number stands last."""
    found: list[tuple[int, str, Any]] = []
    for pattern, text, description in packed:
        if text == "-1":
            found.append((1 << 30, pattern, description))
        else:
            found += [(number, pattern.format(number), description) for number in numbers(text)]
    return {name: description for _, name, description in sorted(found, key=lambda each: each[0])}

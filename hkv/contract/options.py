"""Options of commands, each declared once: a typed field of a dataclass, from which click and `--help` are made.

An option is called as its field is, and its default is the field's, shown unless it says nothing (None, False, an empty
text). One whose default is False is a flag; one whose default is () may be given again. Types of values that several
commands take are here, too: each reads a text, and refuses what is out of bounds.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import click

from hkv.contract.option_fields import KEY
from hkv.contract.option_fields import argument as argument
from hkv.contract.option_fields import group as group
from hkv.contract.option_fields import listed as listed
from hkv.contract.option_fields import option as option
from hkv.errors import ConfigError, MissingExtraError
from hkv.limits import MAX_COUNT, MAX_RANKS, MAX_SECONDS, MAX_SEED, MAX_TOKENS

Declared = TypeVar("Declared")


def parameters(declared: type) -> list[click.Parameter]:
    """Arguments and options of a command, in the order of the fields that declare them, inherited ones last."""
    found: list[click.Parameter] = []
    for field in sorted(dataclasses.fields(declared), key=lambda field: field.name not in declared.__annotations__):
        match field.metadata.get(KEY):
            case (tuple(names), dict(settings)):
                found.append(_option(field, names, settings))
            case dict(settings):
                found.append(click.Argument([field.name], **settings))
            case type() as inner:
                found += parameters(inner)
            case tuple(options):
                found += options
    return found


def _option(field: dataclasses.Field[Any], names: Sequence[str], settings: dict[str, Any]) -> click.Option:
    match settings.get("type"):
        case range(start=least, stop=end):
            settings = settings | {"type": click.IntRange(least, end - 1)}
        case tuple(choices):
            settings = settings | {"type": click.Choice(choices)}
    inferred: dict[str, Any] = {"default": None} if any("/" in name for name in names) else {}  # not yes, and not no
    if field.default == ():
        inferred |= {"multiple": True}
    elif field.default is not None:
        inferred |= {"default": field.default, "show_default": field.default != ""}
    if field.default is False:
        inferred |= {"is_flag": True, "show_default": False}
    names = names or (f"--{field.name.replace('_', '-')}",)
    named = any(name.isidentifier() for name in names)  # the name that values have, if not the field's
    return click.Option([*names] if named else [field.name, *names], **inferred | settings)


def declared_of(declared: type[Declared], values: Mapping[str, Any]) -> Declared:
    """The options as one value, of those that click found."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(declared):  # type: ignore[arg-type]
        match field.metadata.get(KEY):
            case type() as inner:
                made[field.name] = declared_of(inner, values)
            case tuple((click.Option(), *_)) as options:
                made[field.name] = {each.name: values[each.name] for each in options}
            case _:
                made[field.name] = values[field.name]
    return declared(**made)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """No option."""


class OwnCommand:
    """A dialect's part of a command.

    Attributes:
      declared: fields that are options which only some dialects have, this one among them. Their defaults stand for not
        being given.
    """

    declared: ClassVar[type] = NoOptions

    def options(self) -> list[click.Option]:
        """The same for click."""
        return [each for each in parameters(self.declared) if isinstance(each, click.Option)]


# Types of values.

COUNT = click.IntRange(1, MAX_COUNT)
"""Things that are gone through one by one."""

TOKENS = click.IntRange(1, MAX_TOKENS)
RANKS = click.IntRange(1, MAX_RANKS)
SEED = click.IntRange(0, MAX_SEED)


class Number(click.FloatRange):
    """A finite number in a range; `click.FloatRange` takes NaN for one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Written(click.ParamType):
    """Values that one function reads from a text, and another writes as it would be typed."""

    def __init__(self, name: str, read: Callable[[str], Any], write: Callable[[Any], Any] = str) -> None:
        self.name, self._read, self._write = name, read, write

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._read(value) if isinstance(value, str) else value

    def written(self, value: Any) -> Any:
        """The text that means a value; None where that says so."""
        return self._write(value)


SECONDS = Number(min=0, max=MAX_SECONDS, min_open=True)
"""A time to wait or to go on for."""

MOST_VALUES = 64
"""More values of one option than that are a slip of the pen."""


class Several(tuple[Any, ...]):
    """Values that were given to one option: a command then makes a row of each combination."""

    __slots__ = ()


class OneOrMore(click.ParamType):
    """Values of another type, `inner`, separated by commas, as a `Several`.

    Raises:
      click.BadParameter: no value, one of another type, the same twice, or more than `MOST_VALUES`.
    """

    def __init__(self, inner: click.ParamType) -> None:
        self.inner = inner
        self.name = f"{inner.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Several:
        if isinstance(value, Several):
            return value
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
        if len(parts) > MOST_VALUES:
            self.fail(f"{len(parts)} values, expected at most {MOST_VALUES}.", param, ctx)
        values = Several(self.inner.convert(part, param, ctx) for part in parts if part != "")
        if not values or len(values) < len(parts):
            self.fail(f"{value!r}: expected a value, or several separated by commas.", param, ctx)
        if len(set(values)) < len(values):
            self.fail(f"{value!r}: expected no value twice.", param, ctx)
        return values

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self.inner.name.upper().replace(" RANGE", "") + ",..."


def percentage(name: str, text: str) -> float:
    """The number in `60%`, or in `60`.

    Raises:
      ConfigError: it is none from 0 to 100.
    """
    try:
        found = float(text.removesuffix("%"))
    except ValueError:
        found = math.nan
    if not 0 <= found <= 100:  # NaN is neither
        raise ConfigError(name, text, "a percentage from 0% to 100%")
    return found


PLOTS = (".png", ".svg")


def check_plot_path(path: str) -> None:
    """Raises ConfigError unless the path ends in one of `PLOTS` or is `-`, MissingExtraError without matplotlib."""
    if path != "-" and pathlib.Path(path).suffix.lower() not in PLOTS:
        raise ConfigError("plot", path, f"a file name that ends in {' or '.join(PLOTS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "to draw the plot") from error

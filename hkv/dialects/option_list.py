"""Options that take several values, separated by commas: a command then makes a row of each combination."""

from __future__ import annotations

from typing import Any

import click

MOST_VALUES = 64
"""More values of one option than that are a slip of the pen."""


class Several(tuple[Any, ...]):
    """Values that were given to one option."""

    __slots__ = ()


class OneOrMore(click.ParamType):
    """Values of another type, separated by commas, as a `Several`.

    Args:
      inner: the type of one.

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
        """The name of a value in the help."""
        return self.inner.name.upper().replace(" RANGE", "") + ",..."

"""Options of a command that only some dialects have: all are on the command line, those of others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import click

from hkv.cli.given_options import is_given
from hkv.contract import registry
from hkv.contract.dialect import Dialect
from hkv.errors import ConfigError, UnsupportedConfigError


class OwnCommand(Protocol):
    """Options and code that a dialect adds to a command."""

    def options(self) -> Sequence[click.Option]:
        """Options that only some dialects have, this one among them."""
        ...


Command = TypeVar("Command", bound=OwnCommand)


def commands(of: Callable[[Dialect], Command]) -> tuple[Command, ...]:
    """Additions of every dialect to a command; dialects that have nothing there are left out."""
    found: list[Command] = []
    for dialect in registry.dialects():
        try:
            found.append(of(dialect))
        except UnsupportedConfigError:
            continue
    return tuple(found)


def own_options(given: Iterable[OwnCommand]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds to a command the options that only some dialects have, each once."""
    options = {option.name: option for command in given for option in command.options()}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options.values()):
            click.decorators._param_memo(function, option)  # type: ignore[attr-defined]
        return function

    return decorate


def refuse_others(command: OwnCommand, given: Iterable[OwnCommand], dialect: str) -> None:
    """Makes sure that no option was given which only other dialects have.

    Args:
      command: of the dialect that was chosen.
      given: of all.
      dialect: the name under which it was chosen.

    Raises:
      ConfigError: names the first that was.
    """
    own = {option.name for option in command.options()}
    for option in (option for other in given for option in other.options()):
        if option.name is not None and option.name not in own and is_given(option.name):
            value = click.get_current_context().params[option.name]
            raise ConfigError(option.opts[0], value, f"none: {option.opts[0]} is not for --dialect {dialect}")

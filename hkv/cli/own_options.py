"""Options of a command that only some dialects have: all are on the command line, those of others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from hkv.bugs import bugs_of_part
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


# Options that were given, where another option takes their meaning away: they are refused, never ignored.


def is_given(name: str) -> bool:
    """True if the parameter of that name was given to the command that runs, be it with its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_given(names: Iterable[str], expected: str) -> None:
    """Makes sure that parameters were not given to the command that runs.

    Args:
      names: of parameters, as the command's function has them.
      expected: the change that is needed, in words.

    Raises:
      ConfigError: names the first option that was.
    """
    context = click.get_current_context()
    names = set(names)
    for parameter in context.command.params:
        if parameter.name in names and is_given(parameter.name):
            raise ConfigError(max(parameter.opts, key=len), context.params[parameter.name], expected)


# `--bugs`: upstream defects to reproduce.

bugs_option = click.option(
    "--bugs",
    multiple=True,
    metavar="NAMES",
    help="Upstream defects to reproduce, comma-separated; may be given again.",
)


def bugs_of(names: Sequence[str], part: str) -> tuple[str, ...]:
    """The defects that `--bugs` names.

    Args:
      names: as typed, one text for each time that the option was given.
      part: subject of the command: `planning` or `manager`.

    Raises:
      ConfigError: there is no such defect, or it is one of another part.
    """
    each = (name.strip() for text in names for name in text.split(","))
    return bugs_of_part(dict.fromkeys(name for name in each if name), part)

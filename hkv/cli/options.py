"""Commands, whose functions take all options as one value; options that only some dialects have; refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from hkv.contract import registry
from hkv.contract.dialect import Dialect
from hkv.contract.options import OwnCommand, declared_of, listed, option, parameters
from hkv.errors import ConfigError, UnsupportedConfigError

Declared = TypeVar("Declared")


def command_of(
    name: str, declared: type[Declared], **settings: Any
) -> Callable[[Callable[[Declared], int | None]], click.Command]:
    """Makes a command of a function that takes its options, as `declared`, and returns the exit status, None for 0."""

    def made(function: Callable[[Declared], int | None]) -> click.Command:
        @functools.wraps(function)
        def called(**values: Any) -> None:
            click.get_current_context().exit(function(declared_of(declared, values)) or 0)

        return click.command(name, params=parameters(declared), **settings)(called)

    return made


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


def own_options(given: Iterable[OwnCommand]) -> Any:
    """A field for the options that only some dialects have, each once."""
    return listed(tuple({option.name: option for command in given for option in command.options()}.values()))


def refuse_others(command: OwnCommand, given: Iterable[OwnCommand], dialect: str) -> None:
    """Raises ConfigError if an option was given which only other dialects have than the one that was chosen."""
    own = {option.name for option in command.options()}
    for each in (each for other in given for each in other.options()):
        if each.name is not None and each.name not in own and is_given(each.name):
            value = click.get_current_context().params[each.name]
            raise ConfigError(each.opts[0], value, f"none: {each.opts[0]} is not for --dialect {dialect}")


# Options that were given, where another option takes their meaning away: they are refused, never ignored.


def is_given(name: str) -> bool:
    """True if the parameter of that name was given to the command that runs, be it with its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_given(names: Iterable[str], expected: str) -> None:
    """Raises ConfigError, with the change that is needed, if a parameter was given to the command that runs."""
    context = click.get_current_context()
    names = set(names)
    for parameter in context.command.params:
        if parameter.name in names and is_given(parameter.name):
            raise ConfigError(max(parameter.opts, key=len), context.params[parameter.name], expected)


# `--bugs`: upstream defects to reproduce.


def bugs_option() -> Any:
    """A field for `--bugs`, which `names_of` reads."""
    said = "Upstream defects to reproduce, comma-separated; may be given again."
    return option((), metavar="NAMES", help=said)


def names_of(texts: Sequence[str]) -> tuple[str, ...]:
    """The names in lists of them, each once."""
    each = (name.strip() for text in texts for name in text.split(","))
    return tuple(dict.fromkeys(name for name in each if name))

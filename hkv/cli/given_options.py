"""Options that were given, where another option takes their meaning away: they are refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.core import ParameterSource

from hkv.errors import ConfigError


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

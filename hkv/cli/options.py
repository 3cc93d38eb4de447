"""Commands, whose functions take all options as one value; options that only some dialects have; refusals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from hkv.contract import registry
from hkv.contract.dialect import Dialect
from hkv.contract.options import COUNT, SECONDS, SEED, OwnCommand, declared_of, group, listed, option, parameters
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.oracle.engines import PREFIX, TIMEOUT, forms
from hkv.oracle.record import Only

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


# Options of the commands that drive engines.

FORMS = forms()
"""Forms in which an engine may be named."""

VERSIONS = click.IntRange(1, max(version for dialect in registry.dialects() for version in dialect.versions))
"""Type of an option for the version of the log format."""

FEATURE_NAMES = tuple(
    dict.fromkeys(
        feature for dialect in registry.dialects() for name in dialect.names for feature in dialect.features(name)
    )
)
"""Features of traffic, under any dialect; `hkv.oracle.record.draw` says which dialect has which."""

KINDS = "; ".join(f"{dialect.title}: {', '.join(dialect.kinds)}" for dialect in registry.dialects())


def timeout_option() -> Any:
    """A field for `--timeout`, which `check_timeout` refuses where no engine is a process."""
    return option(TIMEOUT, type=SECONDS, help="Seconds that an engine of the form cmd:... may take for one answer.")


def check_timeout(*engines: str) -> None:
    """Raises ConfigError if `--timeout` is given, and none of the engines is a process of its own."""
    if not any(engine.startswith(PREFIX) for engine in engines):
        refuse_given(["timeout"], f"an engine of the form {PREFIX}...; {' and '.join(engines)} are no such")


def ids_option() -> Any:
    """A field for `--ids`."""
    said = "Whether block ids must be equal, or equal up to a renaming of blocks."
    return option("exact", type=click.Choice(("exact", "isomorphic")), help=said)


def dialect_option() -> Any:
    """A field for `--dialect`."""
    return option(registry.DEFAULT, type=click.Choice(registry.names()), help="Whose rules.")


def defaults(of: Callable[[Dialect], str]) -> str:
    """Default of an option, for help texts: the default dialect's, then those of the others."""
    first = registry.dialect_of(registry.DEFAULT)
    others = [f"{of(other)} under {other.title}'s rules" for other in registry.dialects() if other is not first]
    return "; ".join([of(first), *others])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restriction:
    """Groups to which random configurations are restricted."""

    kinds: str | None = option(metavar="KINDS", help=f"Only groups of these kinds: {KINDS}.")
    max_groups: int | None = option(type=COUNT, help="At most so many groups.")

    def under(self, dialect: str) -> Only:
        """The same, under a dialect's rules; ConfigError where it has no such kind."""
        kinds = frozenset(kind.strip() for kind in (self.kinds or "").split(",") if kind.strip())
        return Only(kinds, self.max_groups, dialect)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """Random traffic of several seeds: from which on, of what, how long."""

    first_seed: int = option(0, type=SEED, help="The first of them.")
    features: Sequence[str] = option(
        (), "--feature", type=click.Choice(FEATURE_NAMES), help="Only this feature; repeatable."
    )
    restriction: Restriction = group(Restriction)
    version: int | None = option(
        type=VERSIONS,
        help="Version of the log format.  [default: all that have the kinds that are asked for, in turn]",
    )
    steps: int = option(16, type=COUNT, help="Scheduling steps a seed.")


def seeds_option(seeds: int) -> Any:
    """A field for `--seeds`, which stands before `TrafficOptions`."""
    return option(seeds, type=COUNT, help="How many seeds a feature.")

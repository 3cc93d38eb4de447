"""Options of the commands that drive engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hkv.cli.numbers import SECONDS
from hkv.cli.own_options import refuse_given
from hkv.contract import registry
from hkv.contract.dialect import Dialect
from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.oracle.engines import forms
from hkv.oracle.engines.engine_process import PREFIX, TIMEOUT
from hkv.oracle.record import Only

timeout_option = click.option(
    "--timeout",
    default=TIMEOUT,
    show_default=True,
    type=SECONDS,
    help="Seconds that an engine of the form cmd:... may take for one answer.",
)


def check_timeout(*engines: str) -> None:
    """Makes sure that `--timeout` is for one of the engines.

    Raises:
      ConfigError: it is given, and none of them is a process of its own.
    """
    if not any(engine.startswith(PREFIX) for engine in engines):
        refuse_given(["timeout"], f"an engine of the form {PREFIX}...; {' and '.join(engines)} are no such")


ids_option = click.option(
    "--ids",
    default="exact",
    show_default=True,
    type=click.Choice(("exact", "isomorphic")),
    help="Whether block ids must be equal, or equal up to a renaming of blocks.",
)


dialect_option = click.option(
    "--dialect",
    default=registry.DEFAULT,
    show_default=True,
    type=click.Choice(registry.names()),
    help="Whose rules.",
)

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


def defaults(of: Callable[[Dialect], str]) -> str:
    """Default of an option, for help texts: the default dialect's, then those of the others."""
    first = registry.dialect_of(registry.DEFAULT)
    others = [f"{of(other)} under {other.title}'s rules" for other in registry.dialects() if other is not first]
    return "; ".join([of(first), *others])


def only_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--kinds` and `--max-groups`, which `only_of` reads."""
    names = "; ".join(f"{dialect.title}: {', '.join(dialect.kinds)}" for dialect in registry.dialects())
    kinds = click.option("--kinds", metavar="KINDS", help=f"Only groups of these kinds: {names}.")
    groups = click.option("--max-groups", type=click.IntRange(1, MAX_COUNT), help="At most so many groups.")
    return kinds(groups(function))


def traffic_options(seeds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options of random traffic of several seeds: which, of what, how long.

    Args:
      seeds: default of `--seeds`.
    """
    features = click.Choice(FEATURE_NAMES)
    said = "Version of the log format.  [default: all that have the kinds that are asked for, in turn]"
    count = {"show_default": True, "type": click.IntRange(1, MAX_COUNT)}
    first = click.IntRange(0, MAX_SEED)
    options = (
        click.option("--seeds", default=seeds, help="How many seeds a feature.", **count),
        click.option("--first-seed", default=0, show_default=True, type=first, help="The first of them."),
        click.option("--feature", "features", multiple=True, type=features, help="Only this feature; repeatable."),
        only_options,
        click.option("--version", type=VERSIONS, help=said),
        click.option("--steps", default=16, help="Scheduling steps a seed.", **count),
    )

    def added(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return added


def only_of(kinds: str | None, max_groups: int | None, dialect: str) -> Only:
    """The restriction that `--kinds`, `--max-groups` and `--dialect` ask for.

    Raises:
      ConfigError: there is no such kind.
    """
    return Only(frozenset(kind.strip() for kind in (kinds or "").split(",") if kind.strip()), max_groups, dialect)

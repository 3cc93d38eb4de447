"""Options of the commands that drive engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import click

from hkv.cli.options import refuse_given
from hkv.contract import registry
from hkv.contract.dialect import Dialect
from hkv.contract.options import COUNT, SECONDS, SEED, group, option
from hkv.oracle.engines import PREFIX, TIMEOUT, forms
from hkv.oracle.record import Only

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
class Traffic:
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
    """A field for `--seeds`, which stands before `Traffic`."""
    return option(seeds, type=COUNT, help="How many seeds a feature.")

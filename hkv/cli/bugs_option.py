"""`--bugs`: upstream defects to reproduce."""

from __future__ import annotations

import click

from hkv.bugs import BUGS, check_bugs
from hkv.dialects.dialect import Dialect
from hkv.errors import ConfigError

bugs_option = click.option(
    "--bugs", default="", metavar="NAMES", help="Upstream defects to reproduce, by name, comma-separated."
)


def bugs_of(names: str, part: str) -> tuple[str, ...]:
    """The defects that `--bugs` names.

    Args:
      names: as typed.
      part: what the command is about: `planning` or `manager`.

    Raises:
      ConfigError: there is no such defect, or it is one of another part.
    """
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    check_bugs(frozenset(found))
    for name in found:
        if BUGS[name].part != part:
            expected = ", ".join(bug.name for bug in BUGS.values() if bug.part == part)
            raise ConfigError("bugs", name, f"a defect that shows here: {expected}")
    return found


def refuse_bugs(names: tuple[str, ...], dialect: Dialect) -> None:
    """Makes sure that no defect is asked for under rules of which none is known.

    Raises:
      ConfigError: one is.
    """
    if names and not dialect.has_bugs:
        expected = f"nothing under {dialect.title}'s rules, of which no defect is known"
        raise ConfigError("bugs", ", ".join(names), expected)

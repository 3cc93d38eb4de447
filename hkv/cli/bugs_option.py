"""`--bugs`: upstream defects to reproduce."""

from __future__ import annotations

import click

from hkv.bugs import check_bugs

bugs_option = click.option(
    "--bugs", default="", metavar="NAMES", help="Upstream defects to reproduce, by name, comma-separated."
)


def bugs_of(names: str) -> tuple[str, ...]:
    """The defects that `--bugs` names.

    Raises:
      ConfigError: there is no such defect.
    """
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    check_bugs(frozenset(found))
    return found

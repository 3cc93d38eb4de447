"""`--bugs`: upstream defects to reproduce."""

from __future__ import annotations

import click

from hkv.bugs import bugs_of_part

bugs_option = click.option(
    "--bugs", default="", metavar="NAMES", help="Upstream defects to reproduce, by name, comma-separated."
)


def bugs_of(names: str, part: str) -> tuple[str, ...]:
    """The defects that `--bugs` names.

    Args:
      names: as typed.
      part: subject of the command: `planning` or `manager`.

    Raises:
      ConfigError: there is no such defect, or it is one of another part.
    """
    return bugs_of_part((name.strip() for name in names.split(",") if name.strip()), part)

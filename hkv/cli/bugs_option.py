"""`--bugs`: upstream defects to reproduce."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hkv.bugs import bugs_of_part

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

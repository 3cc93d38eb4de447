"""Console blocks of documents: commands after `$ ` and all of their output, a line `...` where some was left out."""

from __future__ import annotations

import dataclasses
import difflib
import re

CUT = "..."
"""A line of a document that stands for one line of output or more."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A command of a console block.

    Attributes:
      command: the command line, without the prompt.
      output: the lines that the document shows below it; `CUT` where some were left out.
    """

    command: str
    output: tuple[str, ...]


def shown_in(page: str) -> list[Shown]:
    """Every command of every console block of a page, in order.

    Raises:
      ValueError: a block has output before its first command.
    """
    found: list[Shown] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        begun = len(found)
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Shown(line[2:], ()))
            elif len(found) == begun:
                raise ValueError(f"{line!r}: a console block begins with `$ ` and a command")
            else:
                found[-1] = dataclasses.replace(found[-1], output=(*found[-1].output, line))
    return found


def difference(shown: Shown, output: str) -> str | None:
    """Difference between the whole output of a command and what is shown of it.

    Args:
      shown: what the document has.
      output: standard output of the command. Spaces at the ends of lines, and empty lines at the end, do not count.

    Returns:
      A difference by lines, `-` the document's and `+` the command's, or None.
    """
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    wanted = [line.rstrip() for line in shown.output]
    if _matches(wanted, lines):
        return None
    return "\n".join([f"$ {shown.command}", *difflib.unified_diff(wanted, lines, "document", "command", lineterm="")])


def _matches(wanted: list[str], lines: list[str]) -> bool:
    """True if lines are those wanted, each cut standing for one or more."""
    pattern = "".join("(?:[^\n]*\n)+" if line == CUT else re.escape(line) + "\n" for line in wanted)
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None

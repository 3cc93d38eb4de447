"""The `--json` option of every command."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from hkv.oracle.atomic import write_atomically

json_option = click.option(
    "--json",
    "json_path",
    metavar="F",
    help="Write the result as JSON to the file F; - for standard output, which then has nothing else.",
)


def write_json(path: str | None, result: Any) -> None:
    """Writes a result as indented JSON to a file, whole or not at all, or to standard output for `-`.

    Raises:
      FileError: the file cannot be written.
    """
    if path is None:
        return
    data = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    if path == "-":
        sys.stdout.write(data.decode())
        sys.stdout.flush()
    else:
        write_atomically(path, data)

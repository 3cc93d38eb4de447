"""The `--json` option of every command."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from hkv.cli.output_option import OutputPath, write_output

json_option = click.option(
    "--json",
    "json_path",
    metavar="F",
    type=OutputPath(),
    help="Write the result as JSON to the file F; - for standard output, which then has nothing else.",
)


def write_json(path: str | None, result: Any) -> None:
    """Writes a result as indented JSON to a file, whole or not at all, or to standard output for `-`.

    Raises:
      FileError: the file cannot be written.
    """
    if path is not None:
        write_output(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")

"""`hkv vectors`: conformance vectors as JSON."""

from __future__ import annotations

import pathlib
import sys

import click
from rich.console import Console
from rich.table import Table

from hkv.cli.output_option import OutputFolder, json_option, write_json
from hkv.cli.progress import progress_bar
from hkv.oracle.vectors import FAMILIES, write_vectors


@click.command("vectors")
@click.argument("folder", metavar="OUT", type=OutputFolder())
@json_option
def command(folder: str, json_path: str | None) -> None:
    """Write conformance vectors to the folder OUT: JSON files of inputs and what must come of them.

    For tests in languages that HKV is not written in. One file a family, a JSON Schema, and index.json with the SHA-256
    of each. The same version of HKV writes the same bytes everywhere.

    Example: hkv vectors vectors/
    """
    with progress_bar("writing", len(FAMILIES)) as advance:
        index = write_vectors(pathlib.Path(folder), advance)
    if json_path != "-":
        table = Table(box=None, pad_edge=False)
        table.add_column("file")
        table.add_column("cases", justify="right")
        table.add_column("about")
        for name, entry in index["files"].items():
            table.add_row(name, str(entry["cases"]), FAMILIES[entry["family"]][0])
        Console(width=None if sys.stdout.isatty() else 110).print(table)
        click.echo(f"version {index['vectors']} of the format, in {folder}")
    write_json(json_path, index)

"""`hkv vectors`: conformance vectors as JSON."""

from __future__ import annotations

import dataclasses
import pathlib

import click

from hkv.cli.options import command_of
from hkv.cli.output_option import OutputFolder, Reported, console, table, talks, write_json
from hkv.cli.progress import progress_bar
from hkv.contract.options import argument
from hkv.oracle.vectors import FAMILIES, write_vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class _VectorsOptions(Reported):
    folder: str = argument(metavar="OUT", type=OutputFolder())


@command_of("vectors", _VectorsOptions)
def command(given: _VectorsOptions) -> None:
    """Write conformance vectors to the folder OUT: JSON files of inputs and expected results.

    For tests in languages that HKV is not written in. One file a family, a JSON Schema, and index.json with the SHA-256
    of each. The same version of HKV writes the same bytes everywhere.

    Example: hkv vectors vectors/
    """
    with progress_bar("writing", len(FAMILIES)) as advance:
        index = write_vectors(pathlib.Path(given.folder), advance)
    if talks(given.json_path):
        files = index["files"].items()
        rows = ((name, entry["cases"], FAMILIES[entry["family"]][0]) for name, entry in files)
        console().print(table("file|>cases|about", rows, box=None, pad_edge=False))
        click.echo(f"version {index['vectors']} of the format, in {given.folder}")
    write_json(given.json_path, index)

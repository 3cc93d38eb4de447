"""`hkv check-connector`: a connector's ranges of bytes, held to the plan."""

from __future__ import annotations

import dataclasses

import click

from hkv.cli.options import command_of
from hkv.cli.output_option import Reported, talks, write_json
from hkv.connectors.cases import ENGINES
from hkv.connectors.check import check_connector
from hkv.contract.options import SECONDS, argument, option
from hkv.processes import PATIENCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckConnectorOptions(Reported):
    connector: str = argument(metavar="TARGET")
    engines: tuple[str, ...] = option(
        (), "engines", "--engine", type=ENGINES, help="Memory of this engine alone; repeatable."
    )
    timeout: float = option(PATIENCE, type=SECONDS, metavar="SECONDS", help="Time that a block may take.")


@command_of("check-connector", _CheckConnectorOptions)
def command(given: _CheckConnectorOptions) -> int:
    """Ask TARGET for the bytes of blocks, of every layout that HKV plans, and hold its answers to the plan.

    TARGET is FILE.py:FUNCTION, MODULE:FUNCTION or LIBRARY.so:FUNCTION. It is told of buffers, groups and tensors as a
    connector is, and returns ranges of bytes (docs/layouts.md). The first line names the mistake; the wheel
    hkv-layouts has the same command without any other package than NumPy.

    Exit status: 0 every answer is right, 1 some are not, 2 unusable input.

    Example: hkv check-connector examples/connector.py:block_ranges
    """
    report = check_connector(given.connector, given.engines, given.timeout)
    if talks(given.json_path):
        click.echo(report.describe())
    write_json(given.json_path, report.record())
    return int(bool(report.wrong))

"""`hkv record`: a log of random traffic from an engine."""

from __future__ import annotations

import dataclasses

import click

from hkv.cli.html import html_field, log_case, write_page
from hkv.cli.options import (
    FEATURE_NAMES,
    FORMS,
    VERSIONS,
    Restriction,
    check_timeout,
    command_of,
    defaults,
    dialect_option,
    timeout_option,
)
from hkv.cli.output_option import Reported, output_field, talks, write_json, write_output
from hkv.contract import registry
from hkv.contract.options import COUNT, SEED, group, option
from hkv.limits import counted
from hkv.oracle.engines import engine_factory
from hkv.oracle.verbs import record


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecordOptions(Reported):
    engine: str | None = option(
        help=f"Which engine to record, one of: {FORMS}.  "
        f"[default: {defaults(lambda dialect: dialect.default_recorded)}]"
    )
    dialect: str = dialect_option()
    feature: str = option(required=True, type=click.Choice(FEATURE_NAMES), help="What the traffic is about.")
    seed: int = option(required=True, type=SEED, help="Seed of the traffic; the same seed, the same log.")
    restriction: Restriction = group(Restriction)
    version: int | None = option(
        type=VERSIONS, help="Version of the log.  [default: 2, or the first that has the kinds]"
    )
    steps: int = option(16, type=COUNT, help="Scheduling steps.")
    output: str = output_field("LOG", "File")
    html: str | None = html_field()
    timeout: float = timeout_option()


@command_of("record", _RecordOptions)
def command(given: _RecordOptions) -> None:
    """Record a log of random traffic from an engine, to check other engines against.

    \b
    Example:
      hkv record --engine vllm --feature partial --seed 7 -o partial-7.jsonl
      hkv record --engine numpy --dialect rtp-llm/hybrid --feature fork --seed 7 -o fork-7.jsonl
    """
    engine = given.engine or registry.dialect_of(given.dialect).default_recorded
    check_timeout(engine)
    found = record(
        given.feature,
        given.seed,
        engine,
        dialect=given.dialect,
        kinds=given.restriction.under(given.dialect).kinds,
        max_groups=given.restriction.max_groups,
        version=given.version,
        steps=given.steps,
        timeout=given.timeout,
    )
    write_output(given.output, found.content)
    operations = len(found.log.operations)
    if talks(given.json_path, given.output, given.html):
        rules = counted(len(found.rules), "rule")
        click.echo(f"{given.output}: {counted(operations, 'operation')} by {engine}, {rules} exercised")
    asked = {name: getattr(found, name) for name in ("engine", "dialect", "feature", "seed", "version")}
    write_json(given.json_path, {"path": given.output, **asked, "operations": operations, "rules": found.rules})
    if given.html is not None:
        case = log_case(found.log, ((engine, engine_factory(engine, given.timeout)),), name=given.output, recorded="")
        write_page(given.html, f"hkv record: {given.output}", [case])

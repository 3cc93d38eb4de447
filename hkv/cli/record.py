"""`hkv record`: a log of random traffic from an engine."""

from __future__ import annotations

import click

from hkv.cli.engine_options import (
    FEATURE_NAMES,
    FORMS,
    VERSIONS,
    check_timeout,
    defaults,
    dialect_option,
    only_of,
    only_options,
    timeout_option,
)
from hkv.cli.output_option import OutputPath, json_option, talks, write_json, write_output
from hkv.contract import registry
from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.oracle.verbs import record


@click.command("record")
@click.option(
    "--engine",
    help=f"Which engine to record, one of: {FORMS}.  [default: {defaults(lambda dialect: dialect.default_recorded)}]",
)
@dialect_option
@click.option("--feature", required=True, type=click.Choice(FEATURE_NAMES), help="What the traffic is about.")
@click.option(
    "--seed", required=True, type=click.IntRange(0, MAX_SEED), help="Seed of the traffic; the same seed, the same log."
)
@only_options
@click.option("--version", type=VERSIONS, help="Version of the log.  [default: 2, or the first that has the kinds]")
@click.option("--steps", default=16, show_default=True, type=click.IntRange(1, MAX_COUNT), help="Scheduling steps.")
@click.option(
    "-o", "--output", required=True, metavar="LOG", type=OutputPath(), help="File to write; - for standard output."
)
@timeout_option
@json_option
def command(
    engine: str | None,
    dialect: str,
    feature: str,
    seed: int,
    kinds: str | None,
    max_groups: int | None,
    version: int | None,
    steps: int,
    output: str,
    timeout: float,
    json_path: str | None,
) -> None:
    """Record a log of random traffic from an engine, to check other engines against.

    \b
    Example:
      hkv record --engine vllm --feature partial --seed 7 -o partial-7.jsonl
      hkv record --engine numpy --dialect rtp-llm/hybrid --feature fork --seed 7 -o fork-7.jsonl
    """
    engine = engine or registry.dialect_of(dialect).default_recorded
    check_timeout(engine)
    wanted = only_of(kinds, max_groups, dialect)
    found = record(
        feature,
        seed,
        engine,
        dialect=dialect,
        kinds=wanted.kinds,
        max_groups=max_groups,
        version=version,
        steps=steps,
        timeout=timeout,
    )
    write_output(output, found.content)
    operations = len(found.log.operations)
    if talks(json_path, output):
        click.echo(f"{output}: {operations} operations by {engine}, {len(found.rules)} rules exercised")
    asked = {name: getattr(found, name) for name in ("engine", "dialect", "feature", "seed", "version")}
    write_json(json_path, {"path": output, **asked, "operations": operations, "rules": found.rules})

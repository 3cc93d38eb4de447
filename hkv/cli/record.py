"""`hkv record`: a log of random traffic from an engine."""

from __future__ import annotations

import click

from hkv.cli.engine_options import (
    FEATURE_NAMES,
    FORMS,
    check_timeout,
    dialect_option,
    only_of,
    only_options,
    timeout_option,
)
from hkv.cli.json_output import json_option, write_json
from hkv.cli.output_option import OutputPath, talks, write_output
from hkv.dialects import registry
from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.record import record


@click.command("record")
@click.option(
    "--engine", help=f"Which engine to record, one of: {FORMS}.  [default: vllm; under RTP-LLM's rules numpy]"
)
@dialect_option
@click.option("--feature", required=True, type=click.Choice(FEATURE_NAMES), help="What the traffic is about.")
@click.option(
    "--seed", required=True, type=click.IntRange(0, MAX_SEED), help="Seed of the traffic; the same seed, the same log."
)
@only_options
@click.option("--version", default=2, show_default=True, type=click.IntRange(1, 2), help="Version of the log format.")
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
    version: int,
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
    rules = registry.dialect_of(dialect)
    engine = engine or rules.default_recorded
    check_timeout(engine)
    factory = engine_factory(engine, timeout)
    recording = record(factory, feature, seed, version, steps, only_of(kinds, max_groups, dialect))
    data = log_bytes(recording.header, recording.operations, recording.answers)
    exercised = rules.exercised(parse_log(data, output))
    write_output(output, data)
    if talks(json_path, output):
        click.echo(f"{output}: {len(recording.operations)} operations by {engine}, {len(exercised)} rules exercised")
    result = {
        "path": output,
        "engine": engine,
        "dialect": dialect,
        "feature": feature,
        "seed": seed,
        "version": version,
    }
    write_json(json_path, {**result, "operations": len(recording.operations), "rules": exercised})

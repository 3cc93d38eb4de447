"""`hkv record`: a log of random traffic from an engine."""

from __future__ import annotations

import click

from hkv.cli.json_output import json_option, write_json
from hkv.oracle.coverage import exercised
from hkv.oracle.engines import ENGINES, engine_factory
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.record import record
from hkv.testing.traffic import FEATURES


@click.command("record")
@click.option("--engine", default="vllm", show_default=True, help=f"Which engine to record: {', '.join(ENGINES)}.")
@click.option("--feature", required=True, type=click.Choice(FEATURES), help="What the traffic is about.")
@click.option("--seed", required=True, type=click.IntRange(0), help="Seed of the traffic; the same seed, the same log.")
@click.option("--version", default=2, show_default=True, type=click.IntRange(1, 2), help="Version of the log format.")
@click.option("--steps", default=16, show_default=True, type=click.IntRange(1), help="Scheduling steps.")
@click.option("-o", "--output", required=True, metavar="LOG", type=click.Path(dir_okay=False), help="File to write.")
@json_option
def command(engine: str, feature: str, seed: int, version: int, steps: int, output: str, json_path: str | None) -> None:
    """Record a log of random traffic from an engine, to check other engines against.

    Example: hkv record --engine vllm --feature partial --seed 7 -o partial-7.jsonl
    """
    recording = record(engine_factory(engine), feature, seed, version, steps)
    write_log(output, recording.header, recording.operations, recording.answers)
    rules = exercised(read_log(output))
    if json_path != "-":
        click.echo(f"{output}: {len(recording.operations)} operations, {len(rules)} rules exercised")
    result = {"path": output, "engine": engine, "feature": feature, "seed": seed, "version": version}
    write_json(json_path, {**result, "operations": len(recording.operations), "rules": rules})

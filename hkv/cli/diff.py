"""`hkv diff`: two engines through the same random traffic."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.cli.json_output import json_option, write_json
from hkv.cli.progress import progress_bar
from hkv.errors import ConfigError
from hkv.oracle.check import describe
from hkv.oracle.engines import ENGINES, engine_factory
from hkv.oracle.log_file import write_log
from hkv.oracle.record import Disagreement, differ, draw
from hkv.testing.traffic import FEATURES


@click.command("diff")
@click.option(
    "--engines", default="numpy,vllm", show_default=True, help="The engine in doubt, then the one that counts."
)
@click.option("--seeds", default=50, show_default=True, type=click.IntRange(1), help="How many seeds a feature.")
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0), help="The first of them.")
@click.option(
    "--feature", "features", multiple=True, type=click.Choice(FEATURES), help="Only this feature; repeatable."
)
@click.option("--version", type=click.IntRange(1, 2), help="Version of the log format. [default: both in turn]")
@click.option("--steps", default=16, show_default=True, type=click.IntRange(1), help="Scheduling steps a seed.")
@click.option("--save", metavar="DIR", type=click.Path(file_okay=False), help="Folder for the log of a difference.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    engines: str,
    seeds: int,
    first_seed: int,
    features: Sequence[str],
    version: int | None,
    steps: int,
    save: str | None,
    json_path: str | None,
) -> None:
    """Drive two engines through the same random traffic and compare every answer, the whole state after each step.

    Stops at the first difference of each feature, prints it, and saves the log up to it, with the answers of the second
    engine, for `hkv check`.

    Exit status: 0 no difference, 1 some, 2 unusable input.

    Example: hkv diff --engines numpy,vllm --seeds 500 --feature eagle --save differences
    """
    tested, right = _engines(engines)
    for name in {tested: None, right: None}:
        engine_factory(name)(draw("core", 0, 1)[0])  # one that is not installed is no difference
    chosen = features or FEATURES
    operations, found = 0, {}
    with progress_bar("comparing", len(chosen) * seeds) as advance:
        for feature in chosen:
            for seed in range(first_seed, first_seed + seeds):
                used = version or 1 + seed % 2
                recording, parted = differ(engine_factory(tested), engine_factory(right), feature, seed, used, steps)
                operations += len(recording.operations)
                advance()
                if parted is not None:
                    found[feature] = _report(parted, feature, seed, used, save, json_path != "-")
                    break
    if json_path != "-":
        click.echo(
            f"{tested} and {right}: {len(found) or 'no'} difference{'s' * (len(found) > 1)} "
            f"in {len(chosen)} features, {seeds} seeds each, {operations:,} operations"
        )
    write_json(json_path, {"engines": [tested, right], "operations": operations, "differences": found})
    context.exit(1 if found else 0)


def _engines(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise ConfigError("engines", name, f"two of {', '.join(ENGINES)}")
    if len(names) != 2:
        raise ConfigError("engines", text, "two names, comma-separated")
    return names[0], names[1]


def _report(
    parted: Disagreement, feature: str, seed: int, version: int, save: str | None, talk: bool
) -> dict[str, Any]:
    recording, mismatch = parted.recording, parted.mismatch
    operation = describe(recording.operations[-1]) if recording.operations else "header"
    result = {
        "seed": seed,
        "version": version,
        "line": len(recording.operations) + 1,
        "operation": operation,
        "field": mismatch.field,
        "want": mismatch.want,
        "got": mismatch.got,
    }
    if talk:
        click.echo(f"{feature} seed {seed} version {version}: line {result['line']}: {operation}")
        click.echo(f"  {mismatch.field}\n  wanted {mismatch.want}\n  got    {mismatch.got}")
    if save is not None:
        path = pathlib.Path(save) / f"{feature}-{seed}-v{version}.jsonl"
        write_log(path, recording.header, recording.operations, recording.answers)
        result["log"] = str(path)
        if talk:
            click.echo(f"  log     {path}")
    return result

"""`hkv trace import`: request traces in the formats of others, as HKV's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from hkv.cli.numbers import SECONDS, Number
from hkv.cli.output_option import OutputPath, json_option, talks, write_json, write_output
from hkv.cli.own_options import refuse_given
from hkv.errors import ConfigError
from hkv.limits import MAX_COUNT, MAX_STEP_MS, MAX_TOKENS
from hkv.oracle.events import Subscription
from hkv.replay.traces.imports.arrivals import MODELS, Pace, SharedPrefix, in_order, own_lines
from hkv.replay.traces.imports.formats import FORMATS, Format
from hkv.replay.traces.imports.imported import Imported, ImportOptions, Remarks
from hkv.replay.traces.imports.kv_events import requests_of
from hkv.replay.traces.imports.texts import BYTES, TEMPLATES

COMMON = {"source", "format", "output", "limit", "json_path"}
"""Parameters that mean something to every format."""

SYNTHETIC_TOKENS = 16
"""Tokens of an id where prefixes are made up."""


class TokenizerFile(click.Path):
    """A file, or `bytes`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == BYTES else super().convert(value, param, ctx)


@click.command("import")
@click.argument("source", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--from", "format", required=True, type=click.Choice(list(FORMATS)), help="The format of SOURCE.")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=OutputPath(),
    help="The trace to write; - for standard output.",
)
@click.option("--limit", type=click.IntRange(1, MAX_COUNT), help="Read the first LIMIT requests only.")
@click.option(
    "--tokens-per-id",
    type=click.IntRange(1, MAX_TOKENS),
    help="Tokens that an id of SOURCE stands for; where it has texts or tokens, ids of so many are written instead.",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    type=TokenizerFile(exists=True, dir_okay=False),
    help="tokenizer.json, for texts; or `bytes`: each byte of UTF-8 is a token.",
)
@click.option(
    "--template",
    default="plain",
    show_default=True,
    type=click.Choice(list(TEMPLATES)),
    help="What stands around messages.",
)
@click.option(
    "--output-tokens", type=click.IntRange(0, MAX_TOKENS), help="Tokens of answers that SOURCE does not give."
)
@click.option(
    "--answers",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="A batch's output file, with its answers.",
)
@click.option("--rate", type=Number(1e-6, 1e9), help="New sessions a second, at random, where SOURCE has no times.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1), help="Of what is made up.")
@click.option(
    "--ms-per-token",
    default=25.0,
    show_default=True,
    type=Number(0, MAX_STEP_MS),
    help="Milliseconds for each token of an answer, before the next turn of its session.",
)
@click.option(
    "--pause", default=15.0, show_default=True, type=Number(0, 1e9), help="Seconds from an answer to the next turn."
)
@click.option("--synthetic", type=click.Choice(MODELS), help="Make up prefixes, by this model.")
@click.option("--prefixes", default=8, show_default=True, type=click.IntRange(1, 10**6), help="Made-up system prompts.")
@click.option(
    "--prefix-tokens", default=1024, show_default=True, type=click.IntRange(1, MAX_TOKENS), help="Tokens of each."
)
@click.option(
    "--group", default=0, show_default=True, type=click.IntRange(0, MAX_COUNT), help="Whose KV events to read."
)
@click.option("--endpoint", metavar="URL", help="Follow a publisher of KV events, such as tcp://127.0.0.1:5557.")
@click.option("--replay-endpoint", metavar="URL", help="Where batches that were missed can be asked for.")
@click.option("--topic", default="", help="Only messages whose topic begins so.")
@click.option("--seconds", type=SECONDS, help="Follow for so long.")
@click.option(
    "--step-ms",
    default=50,
    show_default=True,
    type=click.IntRange(1, MAX_STEP_MS),
    help="Milliseconds of a log's step.",
)
@json_option
def command(source: str | None, format: str, output: str, json_path: str | None, **options: Any) -> None:
    """Make a trace for `hkv replay` of SOURCE, a trace in another format.

    SOURCE is a file, perhaps compressed (gzip, Zstandard), a pipe, or - for standard input. Formats with ids of blocks:
    mooncake, bailian, timed-trace, dynamo (sessions with delays). With texts, which want --tokenizer: sharegpt,
    openai-chat, openai-batch, prompts, text (a prompt a line). Of lengths and times alone, so that nothing is ever
    found in a cache: azure, burstgpt. And kv-events (vLLM's, recorded by `hkv check-events --record` or from
    --endpoint) and operation-log.

    \b
    Example:
      hkv trace import conversation_trace.jsonl --from mooncake -o trace.jsonl
      zcat azure.csv.gz | hkv trace import - --from azure -o trace.jsonl
      hkv trace import sharegpt.json --from sharegpt --tokenizer tokenizer.json --rate 2 -o chats.jsonl
    """
    chosen = FORMATS[format]
    _check_options(source, format, chosen, options)
    remarks = Remarks()
    told = {
        "tokenizer": options["tokenizer"] or "",
        "answers": options["answers"] or "",
        "ms_per_step": options["step_ms"],
        **{name: options[name] for name in ("template", "output_tokens", "group")},
    }
    per_id = options["tokens_per_id"] or chosen.tokens_per_id
    settings = ImportOptions(tokens_per_id=per_id or 1, **told)
    if options["endpoint"] is None:
        found = list(itertools.islice(chosen.read(source or "", settings, remarks), options["limit"]))
    else:
        found = _followed(settings, remarks, options)
    if not found:
        raise ConfigError("source", source or options["endpoint"], "at least one request")
    pace = Pace(
        rate=options["rate"], seed=options["seed"], ms_per_token=options["ms_per_token"], pause=options["pause"] * 1000
    )
    requests = in_order(found, pace, remarks)
    if options["synthetic"]:
        per_id = per_id or SYNTHETIC_TOKENS
        model = SharedPrefix(prefixes=options["prefixes"], tokens=options["prefix_tokens"], seed=options["seed"])
        model.give_ids(requests, per_id)
    lines = own_lines(requests, per_id, options["synthetic"] or "")
    write_output(output, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    totals = _totals(requests, per_id)
    write_json(
        json_path, {"format": format, "totals": totals, "synthetic": options["synthetic"], "remarks": remarks.counts}
    )
    if talks(json_path, output):
        _print(output, totals, options["synthetic"], remarks)


def _check_options(source: str | None, format: str, chosen: Format, options: dict[str, Any]) -> None:
    refuse_given(set(options) - COMMON - set(chosen.options), f"nothing with --from {format}")
    if (source is None) == (options["endpoint"] is None):
        either = " or --endpoint" if "endpoint" in chosen.options else ""
        raise click.UsageError(f"a SOURCE{either} is wanted")
    if options["endpoint"] is None:
        refuse_given(("replay_endpoint", "topic", "seconds"), "--endpoint, not a SOURCE")
    elif options["seconds"] is None:
        raise click.UsageError("--endpoint wants --seconds beside it: a trace has an end")
    if options["synthetic"] is None and "synthetic" in chosen.options:
        refuse_given(("prefixes", "prefix_tokens", "tokens_per_id", "seed"), "--synthetic, whose model it is for")


def _followed(settings: ImportOptions, remarks: Remarks, options: dict[str, Any]) -> Sequence[Imported]:
    """The requests that a publisher's events show meanwhile."""
    names = ("endpoint", "replay_endpoint", "topic", "seconds")
    with Subscription(*(options[name] for name in names)) as items:
        return list(itertools.islice(requests_of(items, settings, remarks), options["limit"]))


def _totals(requests: Sequence[Imported], per_id: int | None) -> dict[str, Any]:
    named = [request for request in requests if request.tokens is not None or request.ids is not None]
    return {
        "requests": len(requests),
        "without_content": len(requests) - len(named),
        "prompt_tokens": sum(request.input_length for request in requests),
        "output_tokens": sum(request.output_length for request in requests),
        "longest_prompt": max(request.input_length for request in requests),
        "milliseconds": max(request.timestamp or 0.0 for request in requests),
        "tokens_per_id": (per_id or 1) if named else None,
    }


def _print(output: str, totals: dict[str, Any], synthetic: str | None, remarks: Remarks) -> None:
    table = Table(title=output, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("remark")
    unknown = totals["without_content"]
    note = "" if not unknown else f"{unknown:,} of them of lengths and times alone: they share nothing"
    table.add_row("requests", f"{totals['requests']:,}", note)
    table.add_row("prompt tokens", f"{totals['prompt_tokens']:,}", "")
    table.add_row("output tokens", f"{totals['output_tokens']:,}", "")
    table.add_row("longest prompt", f"{totals['longest_prompt']:,}", "")
    table.add_row("duration", f"{totals['milliseconds'] / 1000:,.1f} s", "")
    if (size := totals["tokens_per_id"]) is not None:
        finer = "" if size == 1 else "what prompts share within an id is lost"
        table.add_row("tokens an id", f"{size:,}", f"prefixes made up: {synthetic}" if synthetic else finer)
    for remark, count in remarks.counts.items():
        table.add_row("", f"{count:,}", remark)
    Console(width=None).print(table)

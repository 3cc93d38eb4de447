"""`hkv trace import`: request traces in the formats of others, as HKV's own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from hkv.cli.options import command_of, refuse_given
from hkv.cli.output_option import Reported, output_field, talks, write_json, write_output
from hkv.contract.options import COUNT, SECONDS, TOKENS, Number, argument, option
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(Reported):
    source: str | None = argument(required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
    format: str = option(None, "--from", required=True, type=click.Choice(list(FORMATS)), help="The format of SOURCE.")
    output: str = output_field("FILE", "The trace")
    limit: int | None = option(type=COUNT, help="Read the first LIMIT requests only.")
    tokens_per_id: int | None = option(
        type=TOKENS,
        help="Tokens that an id of SOURCE stands for; where it has texts or tokens, ids of so many are written "
        "instead.",
    )
    tokenizer: str | None = option(
        metavar="FILE",
        type=TokenizerFile(exists=True, dir_okay=False),
        help="tokenizer.json, for texts; or `bytes`: each byte of UTF-8 is a token.",
    )
    template: str = option("plain", type=click.Choice(list(TEMPLATES)), help="What stands around messages.")
    output_tokens: int | None = option(
        type=click.IntRange(0, MAX_TOKENS), help="Tokens of answers that SOURCE does not give."
    )
    answers: str | None = option(
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="A batch's output file, with its answers.",
    )
    rate: float | None = option(
        type=Number(1e-6, 1e9), help="New sessions a second, at random, where SOURCE has no times."
    )
    seed: int = option(0, type=click.IntRange(0, 2**31 - 1), help="Of what is made up.")
    ms_per_token: float = option(
        25.0,
        type=Number(0, MAX_STEP_MS),
        help="Milliseconds for each token of an answer, before the next turn of its session.",
    )
    pause: float = option(15.0, type=Number(0, 1e9), help="Seconds from an answer to the next turn.")
    synthetic: str | None = option(type=click.Choice(MODELS), help="Make up prefixes, by this model.")
    prefixes: int = option(8, type=click.IntRange(1, 10**6), help="Made-up system prompts.")
    prefix_tokens: int = option(1024, type=TOKENS, help="Tokens of each.")
    group: int = option(0, type=click.IntRange(0, MAX_COUNT), help="Whose KV events to read.")
    endpoint: str | None = option(metavar="URL", help="Follow a publisher of KV events, such as tcp://127.0.0.1:5557.")
    replay_endpoint: str | None = option(metavar="URL", help="Where batches that were missed can be asked for.")
    topic: str = option("", help="Only messages whose topic begins so.")
    seconds: float | None = option(type=SECONDS, help="Follow for so long.")
    step_ms: int = option(50, type=click.IntRange(1, MAX_STEP_MS), help="Milliseconds of a log's step.")


@command_of("import", _Options)
def command(given: _Options) -> None:
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
    chosen = FORMATS[given.format]
    _check_options(given, chosen)
    remarks = Remarks()
    per_id = given.tokens_per_id or chosen.tokens_per_id
    settings = ImportOptions(
        tokens_per_id=per_id or 1,
        tokenizer=given.tokenizer or "",
        answers=given.answers or "",
        ms_per_step=given.step_ms,
        template=given.template,
        output_tokens=given.output_tokens,
        group=given.group,
    )
    if given.endpoint is None:
        found = list(itertools.islice(chosen.read(given.source or "", settings, remarks), given.limit))
    else:
        with Subscription(given.endpoint, given.replay_endpoint, given.topic, given.seconds) as items:
            found = list(itertools.islice(requests_of(items, settings, remarks), given.limit))
    if not found:
        raise ConfigError("source", given.source or given.endpoint, "at least one request")
    pace = Pace(rate=given.rate, seed=given.seed, ms_per_token=given.ms_per_token, pause=given.pause * 1000)
    requests = in_order(found, pace, remarks)
    if given.synthetic:
        per_id = per_id or SYNTHETIC_TOKENS
        model = SharedPrefix(prefixes=given.prefixes, tokens=given.prefix_tokens, seed=given.seed)
        model.give_ids(requests, per_id)
    lines = own_lines(requests, per_id, given.synthetic or "")
    write_output(given.output, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    totals = _totals(requests, per_id)
    said = {"format": given.format, "totals": totals, "synthetic": given.synthetic, "remarks": remarks.counts}
    write_json(given.json_path, said)
    if talks(given.json_path, given.output):
        _print(given.output, totals, given.synthetic, remarks)


def _check_options(given: _Options, chosen: Format) -> None:
    own = {field.name for field in dataclasses.fields(given)} - COMMON - set(chosen.options)
    refuse_given(own, f"nothing with --from {given.format}")
    if (given.source is None) == (given.endpoint is None):
        either = " or --endpoint" if "endpoint" in chosen.options else ""
        raise click.UsageError(f"a SOURCE{either} is wanted")
    if given.endpoint is None:
        refuse_given(("replay_endpoint", "topic", "seconds"), "--endpoint, not a SOURCE")
    elif given.seconds is None:
        raise click.UsageError("--endpoint wants --seconds beside it: a trace has an end")
    if given.synthetic is None and "synthetic" in chosen.options:
        refuse_given(("prefixes", "prefix_tokens", "tokens_per_id", "seed"), "--synthetic, whose model it is for")


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
    for name in ("requests", "prompt_tokens", "output_tokens", "longest_prompt"):
        table.add_row(name.replace("_", " "), f"{totals[name]:,}", note if name == "requests" else "")
    table.add_row("duration", f"{totals['milliseconds'] / 1000:,.1f} s", "")
    if (size := totals["tokens_per_id"]) is not None:
        finer = "" if size == 1 else "what prompts share within an id is lost"
        table.add_row("tokens an id", f"{size:,}", f"prefixes made up: {synthetic}" if synthetic else finer)
    for remark, count in remarks.counts.items():
        table.add_row("", f"{count:,}", remark)
    Console(width=None).print(table)

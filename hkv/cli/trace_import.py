"""`hkv trace import`: request traces in the formats of others, as HKV's own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from hkv.cli.options import command_of, refuse_given
from hkv.cli.output_option import Reported, console, output_field, table, talks, write_json, write_output
from hkv.contract.options import COUNT, argument, group, option
from hkv.errors import ConfigError
from hkv.oracle.events import Subscription
from hkv.replay.traces.formats import FORMATS, Format, requests_of
from hkv.replay.traces.imported import ImportOptions, Remarks, give_ids, in_order
from hkv.replay.traces.reader import NewRequest, own_lines

SYNTHETIC_TOKENS = 16
"""Tokens of an id where prefixes are made up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TraceImportOptions(Reported):
    source: str | None = argument(required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
    format: str = option(None, "--from", required=True, type=click.Choice(list(FORMATS)), help="The format of SOURCE.")
    output: str = output_field("FILE", "The trace")
    limit: int | None = option(type=COUNT, help="Read the first LIMIT requests only.")
    how: ImportOptions = group(ImportOptions)


@command_of("import", _TraceImportOptions)
def command(given: _TraceImportOptions) -> None:
    """Make a trace for `hkv replay` of SOURCE, a trace in another format.

    SOURCE is a file, perhaps compressed (gzip, Zstandard), a pipe, or - for standard input. Formats with ids of blocks:
    mooncake, bailian, timed-trace, dynamo (sessions with delays), agentic (conversations of agents). With texts, which
    want --tokenizer: sharegpt, lmsys, wildchat, openai-chat, openai-batch, prompts, text (a prompt a line). Of lengths
    and times alone, so that nothing is ever found in a cache: azure, burstgpt, vidur, splitwise. And kv-events (vLLM's,
    recorded by `hkv check-events --record` or from --endpoint) and operation-log.

    \b
    Example:
      hkv trace import conversation_trace.jsonl --from mooncake -o trace.jsonl
      zcat azure.csv.gz | hkv trace import - --from azure -o trace.jsonl
      hkv trace import sharegpt.json --from sharegpt --tokenizer tokenizer.json --rate 2 -o chats.jsonl
    """
    chosen, how = FORMATS[given.format], given.how
    _check_options(given, chosen)
    remarks = Remarks()
    per_id = how.tokens_per_id or chosen.tokens_per_id
    settings = dataclasses.replace(how, tokens_per_id=per_id)
    if how.endpoint is None:
        found = list(itertools.islice(chosen.read(given.source or "", settings, remarks), given.limit))
    else:
        with Subscription(how.endpoint, how.replay_endpoint, how.topic, how.seconds) as items:
            found = list(itertools.islice(requests_of(items, settings, remarks), given.limit))
    if not found:
        raise ConfigError("source", given.source or how.endpoint, "at least one request")
    requests = in_order(found, how, remarks)
    if how.synthetic:
        per_id = per_id or SYNTHETIC_TOKENS
        give_ids(requests, how, per_id)
    lines = own_lines(requests, per_id, how.synthetic or "")
    write_output(given.output, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    totals = _totals(requests, per_id)
    said = {"format": given.format, "totals": totals, "synthetic": how.synthetic, "remarks": remarks.counts}
    write_json(given.json_path, said)
    if talks(given.json_path, given.output):
        _print(given.output, totals, how.synthetic, remarks)


def _check_options(given: _TraceImportOptions, chosen: Format) -> None:
    how = given.how
    refuse_given(
        {field.name for field in dataclasses.fields(how)} - set(chosen.options), f"nothing with --from {given.format}"
    )
    if (given.source is None) == (how.endpoint is None):
        either = " or --endpoint" if "endpoint" in chosen.options else ""
        raise click.UsageError(f"a SOURCE{either} is wanted")
    if how.endpoint is None:
        refuse_given(("replay_endpoint", "topic", "seconds"), "--endpoint, not a SOURCE")
    elif how.seconds is None:
        raise click.UsageError("--endpoint wants --seconds beside it: a trace has an end")
    if how.synthetic is None and "synthetic" in chosen.options:
        refuse_given(("prefixes", "prefix_tokens", "tokens_per_id", "seed"), "--synthetic, whose model it is for")


def _totals(requests: Sequence[NewRequest], per_id: int | None) -> dict[str, Any]:
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
    unknown = totals["without_content"]
    note = "" if not unknown else f"{unknown:,} of them of lengths and times alone: they share nothing"
    names = ("requests", "prompt_tokens", "output_tokens", "longest_prompt")
    rows = [(name.replace("_", " "), f"{totals[name]:,}", note if name == "requests" else "") for name in names]
    rows.append(("duration", f"{totals['milliseconds'] / 1000:,.1f} s", ""))
    if (size := totals["tokens_per_id"]) is not None:
        finer = "" if size == 1 else "what prompts share within an id is lost"
        rows.append(("tokens an id", f"{size:,}", f"prefixes made up: {synthetic}" if synthetic else finer))
    rows += [("", f"{count:,}", remark) for remark, count in remarks.counts.items()]
    console(wide=False).print(table("what|>value|remark", rows, title=output, show_header=False))

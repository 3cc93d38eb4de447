"""`hkv trace`: generates a request trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from hkv.cli.numbers import Number
from hkv.cli.output_option import OutputPath, json_option, talks, write_json, write_output
from hkv.cli.own_options import refuse_given
from hkv.cli.progress import progress_bar
from hkv.limits import MAX_COUNT, MAX_TOKENS
from hkv.replay.traces.reader import TOKENS_PER_ID
from hkv.replay.traces.workloads import DEFAULTS, FORMATS, MAX_LENGTH, Workload, generate, trace_lines

NOT_OF = {"chat": ["branch_percent"], "shared-prefix": ["turns", "pause", "branch_percent"], "agentic": []}
"""Options that say nothing to a workload: single requests have no turns, and only tasks branch."""


@dataclasses.dataclass
class _Totals:
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    longest_prompt: int = 0
    milliseconds: int = 0


@click.command()
@click.argument("workload", type=click.Choice(list(DEFAULTS)))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=OutputPath(),
    help="The trace to write; - for standard output.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1), help="Of the generator.")
@click.option("--requests", type=click.IntRange(1, MAX_COUNT), help="Requests to generate.")
@click.option("--rate", type=Number(1e-6, 1e9), help="New sessions a second: chats, single requests, or agents' tasks.")
@click.option("--prefixes", type=click.IntRange(1, 10**6), help="Different system prompts, the first the most popular.")
@click.option("--prefix-tokens", type=click.IntRange(0, MAX_LENGTH), help="Mean tokens of a system prompt.")
@click.option(
    "--prompt-tokens", type=click.IntRange(1, MAX_LENGTH), help="Mean tokens of what a user says, or a tool returns."
)
@click.option("--output-tokens", type=click.IntRange(1, MAX_LENGTH), help="Mean tokens of an answer.")
@click.option("--turns", type=Number(1, 1e9), help="Mean requests of a chat or a task.")
@click.option("--pause", type=Number(0, 1e9), help="Mean seconds from an answer to the next request of its session.")
@click.option(
    "--branch-percent", type=click.IntRange(0, 100), help="Of 100 agent's requests, how many start two more agents."
)
@click.option("--max-tokens", type=click.IntRange(2, MAX_TOKENS), help="Most tokens of prompt and output together.")
@click.option("--format", default=FORMATS[0], show_default=True, type=click.Choice(FORMATS), help="Of the lines.")
@click.option(
    "--tokens-per-id",
    default=TOKENS_PER_ID,
    show_default=True,
    type=click.IntRange(1, MAX_TOKENS),
    help="Tokens an id names.",
)
@json_option
def command(workload: str, output: str, seed: int, format: str, tokens_per_id: int, **options: Any) -> None:
    """Generate a request trace: one JSON object a line, for `hkv replay`.

    WORKLOAD is `chat` (sessions of many turns, each request carrying all that was said before), `shared-prefix` (single
    requests that share system prompts) or `agentic` (contexts that grow by tool calls and branch). Options not given
    are as usual for the workload.

    \b
    Example:
      hkv trace chat -o chat.jsonl --requests 500 --seed 1
      hkv trace agentic -o agents.jsonl --format tokens --turns 30
    """
    json_path = options.pop("json_path")
    refuse_given(NOT_OF[workload], f"nothing with the workload {workload}")
    chosen = {name: value for name, value in options.items() if value is not None}
    settings = dataclasses.replace(DEFAULTS[workload], **chosen)
    totals = _Totals()
    with progress_bar("trace", settings.requests) as advance:
        lines = _encoded(workload, settings, seed, format, tokens_per_id, totals, advance)
        data = b"".join(lines)
    write_output(output, data)
    result = {"workload": workload, "seed": seed, **dataclasses.asdict(settings), "totals": dataclasses.asdict(totals)}
    write_json(json_path, result)
    if talks(json_path, output):
        _print(output, totals)


def _encoded(
    workload: str, settings: Workload, seed: int, format: str, tokens_per_id: int, totals: _Totals, advance: Any
) -> Iterator[bytes]:
    def counted() -> Iterator[Any]:
        for request in generate(workload, settings, seed):
            totals.requests += 1
            totals.prompt_tokens += len(request.tokens)
            totals.output_tokens += len(request.output)
            totals.longest_prompt = max(totals.longest_prompt, len(request.tokens))
            totals.milliseconds = request.timestamp
            advance()
            yield request

    return (msgspec.json.encode(line) + b"\n" for line in trace_lines(counted(), format, tokens_per_id))


def _print(output: str, totals: _Totals) -> None:
    table = Table(title=output, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("requests", f"{totals.requests:,}")
    table.add_row("prompt tokens", f"{totals.prompt_tokens:,}")
    table.add_row("output tokens", f"{totals.output_tokens:,}")
    table.add_row("longest prompt", f"{totals.longest_prompt:,}")
    table.add_row("duration", f"{totals.milliseconds / 1000:,.1f} s")
    Console().print(table)

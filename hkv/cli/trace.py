"""`hkv trace`: generates a request trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
import msgspec
from rich.console import Console

from hkv.cli.options import command_of, refuse_given
from hkv.cli.output_option import Reported, output_field, table, talks, write_json, write_output
from hkv.cli.progress import progress_bar
from hkv.contract.options import COUNT, TOKENS, Number, argument, group, option
from hkv.limits import MAX_TOKENS
from hkv.replay.traces.reader import TOKENS_PER_ID
from hkv.replay.traces.workloads import DEFAULTS, FORMATS, MAX_LENGTH, generate, trace_lines

LENGTH = click.IntRange(1, MAX_LENGTH)

NOT_OF = {"chat": ["branch_percent"], "shared-prefix": ["turns", "pause", "branch_percent"], "agentic": []}
"""Options that say nothing to a workload: single requests have no turns, and only tasks branch."""


@dataclasses.dataclass
class _Totals:
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    longest_prompt: int = 0
    milliseconds: int = 0

    def of(self, requests: Iterable[Any], advance: Callable[[], None]) -> Iterator[Any]:
        """The requests, each counted as it is taken."""
        for request in requests:
            self.requests += 1
            self.prompt_tokens += len(request.tokens)
            self.output_tokens += len(request.output)
            self.longest_prompt = max(self.longest_prompt, len(request.tokens))
            self.milliseconds = request.timestamp
            advance()
            yield request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options that a workload has a default of its own for."""

    requests: int | None = option(type=COUNT, help="Requests to generate.")
    rate: float | None = option(
        type=Number(1e-6, 1e9), help="New sessions a second: chats, single requests, or agents' tasks."
    )
    prefixes: int | None = option(
        type=click.IntRange(1, 10**6), help="Different system prompts, the first the most popular."
    )
    prefix_tokens: int | None = option(type=click.IntRange(0, MAX_LENGTH), help="Mean tokens of a system prompt.")
    prompt_tokens: int | None = option(type=LENGTH, help="Mean tokens of what a user says, or a tool returns.")
    output_tokens: int | None = option(type=LENGTH, help="Mean tokens of an answer.")
    turns: float | None = option(type=Number(1, 1e9), help="Mean requests of a chat or a task.")
    pause: float | None = option(
        type=Number(0, 1e9), help="Mean seconds from an answer to the next request of its session."
    )
    branch_percent: int | None = option(
        type=click.IntRange(0, 100), help="Of 100 agent's requests, how many start two more agents."
    )
    max_tokens: int | None = option(
        type=click.IntRange(2, MAX_TOKENS), help="Most tokens of prompt and output together."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(Reported):
    workload: str = argument(type=click.Choice(list(DEFAULTS)))
    output: str = output_field("FILE", "The trace")
    seed: int = option(0, type=click.IntRange(0, 2**31 - 1), help="Of the generator.")
    settings: Settings = group(Settings)
    format: str = option(FORMATS[0], type=click.Choice(FORMATS), help="Of the lines.")
    tokens_per_id: int = option(TOKENS_PER_ID, type=TOKENS, help="Tokens an id names.")


@command_of("trace", _Options)
def command(given: _Options) -> None:
    """Generate a request trace: one JSON object a line, for `hkv replay`.

    WORKLOAD is `chat` (sessions of many turns, each request carrying all that was said before), `shared-prefix` (single
    requests that share system prompts) or `agentic` (contexts that grow by tool calls and branch). Options not given
    are as usual for the workload.

    \b
    Example:
      hkv trace chat -o chat.jsonl --requests 500 --seed 1
      hkv trace agentic -o agents.jsonl --format tokens --turns 30
    """
    workload, seed = given.workload, given.seed
    refuse_given(NOT_OF[workload], f"nothing with the workload {workload}")
    chosen = {name: value for name, value in dataclasses.asdict(given.settings).items() if value is not None}
    settings = dataclasses.replace(DEFAULTS[workload], **chosen)
    totals = _Totals()
    with progress_bar("trace", settings.requests) as advance:
        requests = totals.of(generate(workload, settings, seed), advance)
        lines = trace_lines(requests, given.format, given.tokens_per_id)
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    write_output(given.output, data)
    result = {"workload": workload, "seed": seed, **dataclasses.asdict(settings), "totals": dataclasses.asdict(totals)}
    write_json(given.json_path, result)
    if talks(given.json_path, given.output):
        _print(given.output, totals)


def _print(output: str, totals: _Totals) -> None:
    names = ("requests", "prompt_tokens", "output_tokens", "longest_prompt")
    rows = [(name.replace("_", " "), f"{getattr(totals, name):,}") for name in names]
    rows.append(("duration", f"{totals.milliseconds / 1000:,.1f} s"))
    Console().print(table("what|>value", rows, title=output, show_header=False))

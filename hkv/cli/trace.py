"""`hkv trace`: generates a request trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
import msgspec

from hkv.cli.options import command_of, refuse_given
from hkv.cli.output_option import Reported, console, output_field, table, talks, write_json, write_output
from hkv.cli.progress import progress_bar
from hkv.contract.options import TOKENS, argument, listed, option, parameters
from hkv.replay.traces.reader import TOKENS_PER_ID, NewRequest
from hkv.replay.traces.workloads import DEFAULTS, FORMATS, Workload, generate, trace_lines

NOT_OF = {"chat": ["branch_percent"], "shared-prefix": ["turns", "pause", "branch_percent"], "agentic": []}
"""Options that say nothing to a workload: single requests have no turns, and only tasks branch."""


@dataclasses.dataclass
class _Totals:
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    longest_prompt: int = 0
    milliseconds: int = 0

    def of(self, requests: Iterable[NewRequest], advance: Callable[[], None]) -> Iterator[NewRequest]:
        """The requests, each counted as it is taken."""
        for request in requests:
            self.requests += 1
            self.prompt_tokens += request.input_length
            self.output_tokens += request.output_length
            self.longest_prompt = max(self.longest_prompt, request.input_length)
            self.milliseconds = int(request.timestamp or 0)
            advance()
            yield request


def _unset() -> list[click.Option]:
    """Parameters of a workload as options without a default: each kind of workload has its own."""
    options = [each for each in parameters(Workload) if isinstance(each, click.Option)]
    for each in options:
        each.default, each.show_default = None, False
    return options


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TraceOptions(Reported):
    workload: str = argument(type=click.Choice(list(DEFAULTS)))
    output: str = output_field("FILE", "The trace")
    seed: int = option(0, type=click.IntRange(0, 2**31 - 1), help="Of the generator.")
    settings: Mapping[str, Any] = listed(_unset())
    format: str = option(FORMATS[0], type=click.Choice(FORMATS), help="Of the lines.")
    tokens_per_id: int = option(TOKENS_PER_ID, type=TOKENS, help="Tokens an id names.")


@command_of("trace", _TraceOptions)
def command(given: _TraceOptions) -> None:
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
    chosen = {name: value for name, value in given.settings.items() if value is not None}
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
    console(wide=False).print(table("what|>value", rows, title=output, show_header=False))

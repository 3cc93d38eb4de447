"""Requests from elsewhere: options of an import, what its formats read from, times of arrival and made-up prefixes."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import click

from hkv.contract.options import SECONDS, TOKENS, Number, option
from hkv.errors import ConfigError, FileError
from hkv.files import decode_json, lines_of, opened, read_whole, shown
from hkv.limits import MAX_COUNT, MAX_STEP_MS, MAX_TOKENS
from hkv.replay.traces.reader import Fields, NewRequest

BYTES = "bytes"
"""Name of the tokenizer that makes a token of every byte of UTF-8."""


@dataclasses.dataclass(frozen=True)
class Template:
    """Text around a message's own. A `{role}` is replaced.

    Attributes:
      end: right after it; a model generates it at an answer's end.
      after: after that.
    """

    before: str = ""
    end: str = ""
    after: str = ""


TEMPLATES = {"plain": Template(), "chatml": Template("<|im_start|>{role}\n", "<|im_end|>", "\n")}
"""By name: nothing at all, and OpenAI's ChatML, which Qwen and others use."""


MODELS = ("shared-prefix",)
"""`shared-prefix`: every prompt begins with one of so many system prompts, the k-th 1/k as popular as the first."""


class TokenizerFile(click.Path):
    """A file, or `bytes`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == BYTES else super().convert(value, param, ctx)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of formats, besides the source: not all of them say something to each."""

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


@dataclasses.dataclass
class Remarks:
    """Things that an import left out or could not know, to be reported to the user: text to count."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def note(self, remark: str, count: int = 1) -> None:
        """Counts something once more."""
        self.counts[remark] = self.counts.get(remark, 0) + count


def require(options: ImportOptions, name: str, format: str, what: str) -> Any:
    """An option that a format cannot do without."""
    value = getattr(options, name)
    if value is None or value == "":
        raise ConfigError(f"--{name.replace('_', '-')}", value, f"{what}, for --from {format}")
    return value


# Lines of JSON and rows of CSV, one at a time, from what may be compressed or a pipe.


def json_lines(path: str) -> Iterator[Fields]:
    """The objects of a file of JSON lines; empty lines are passed over."""
    with opened(path) as file:
        for number, text in enumerate(lines_of(file, path), start=1):
            if text.strip():
                yield Fields.of(path, number, text)


def text_lines(path: str) -> Iterator[tuple[int, str]]:
    """Lines of text that are not empty, without their ends, with their numbers."""
    with opened(path) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise FileError(shown(path), number, "", str(error), "text in UTF-8") from None
            if text.strip():
                yield number, text


def json_entries(path: str) -> Iterator[Fields]:
    """The objects of a file that is one JSON list, or one object over several lines, or has one a line; from 1 on."""
    text = read_whole(path)
    first = text.lstrip().split(b"\n", 1)[0].rstrip()
    if not first.startswith(b"[") and first.endswith(b"}"):
        for number, line in enumerate(lines_of(io.BytesIO(text), path), start=1):
            if line.strip():
                yield Fields.of(path, number, line)
        return
    entries = decode_json(text, path, None, "JSON")
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], start=1):
        yield Fields(path, number, entry)


def csv_rows(path: str, columns: tuple[str, ...]) -> Iterator[Fields]:
    """The rows of a CSV file with a heading that has at least these columns, which are numbered from line 2."""
    with opened(path) as file:
        try:
            rows = csv.reader(codecs.iterdecode(lines_of(file, path), "utf-8-sig"))
            names = next(rows, [])
            for column in columns:
                if column not in names:
                    raise FileError(shown(path), 1, "", names, f"a heading with the column {column!r}")
            for row in rows:
                if row:
                    yield Fields(path, rows.line_num, dict(zip(names, row, strict=False)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise FileError(shown(path), None, "", str(error), "CSV in UTF-8") from None


# Times of arrival, and prefixes that are made up.

MODELLED = "arrivals made up: sessions come at random, --rate a second on the average"
FOLLOWING = "arrivals made up: a turn comes its delay after the answer before it, --ms-per-token for each of its tokens"
REORDERED = "requests that stood after a later one, put in order of arrival"


def in_order(requests: Sequence[NewRequest], options: ImportOptions, remarks: Remarks) -> list[NewRequest]:
    """The requests in order of arrival, each with its time; the first comes at 0."""
    source = random.Random(options.seed)
    clock = 0.0
    answered: dict[str, float] = {}
    for request in requests:
        if request.timestamp is None and request.session in answered:
            delay = 1000 * options.pause if request.delay is None else request.delay
            request.timestamp = answered[request.session] + delay
            remarks.note(FOLLOWING)
        elif request.timestamp is None:
            if options.rate is None:
                raise ConfigError("--rate", None, f"new requests a second: request {request.line} has no time")
            request.timestamp = clock
            clock += 1000 * source.expovariate(options.rate)
            remarks.note(MODELLED)
        if request.session:
            answered[request.session] = request.timestamp + request.output_length * options.ms_per_token
    times = [request.timestamp or 0.0 for request in requests]
    late = sum(time < before for before, time in itertools.pairwise(times))
    if late:
        remarks.note(REORDERED, late)
    ordered = sorted(requests, key=lambda request: request.timestamp or 0.0)
    first = min(times, default=0.0)
    for request in ordered:
        request.timestamp = (request.timestamp or 0.0) - first
    return ordered


def give_ids(requests: Sequence[NewRequest], options: ImportOptions, tokens_per_id: int) -> None:
    """Gives every request ids: those of its system prompt's whole parts, then ids that no other request has."""
    source = random.Random(options.seed)
    weights = [1 / (rank + 1) for rank in range(options.prefixes)]
    shared = options.prefix_tokens // tokens_per_id
    fresh = options.prefixes * shared
    for request, prefix in zip(
        requests, source.choices(range(options.prefixes), weights, k=len(requests)), strict=True
    ):
        count = -(-request.input_length // tokens_per_id)
        common = min(shared, request.input_length // tokens_per_id)
        request.ids = [*range(prefix * shared, prefix * shared + common), *range(fresh, fresh + count - common)]
        fresh += count - common

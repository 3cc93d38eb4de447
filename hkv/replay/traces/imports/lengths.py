"""Traces without texts: prompts named by ids of blocks (Mooncake, Bailian, vLLM, Dynamo), or not at all (Azure)."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from hkv.replay.traces.imports.imported import (
    MAX_LENGTH,
    Fields,
    Imported,
    ImportOptions,
    Remarks,
    csv_rows,
    json_lines,
)

NO_CONTENT = "requests without ids: only their lengths and times are known"


def mooncake(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """Mooncake's traces (FAST'25): milliseconds, an id for 512 tokens."""
    yield from _rows(path, options.tokens_per_id, 1)


def bailian(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """Alibaba's `qwen-bailian-usagetraces-anon`: seconds, an id for 16 tokens; a turn's prompt is whole."""
    yield from _rows(path, options.tokens_per_id, 1000)


def timed_trace(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """Timed traces as `vllm bench serve` reads them under its defaults: seconds, an id for 16 tokens."""
    yield from _rows(path, options.tokens_per_id, 1000)


def _rows(path: str, tokens_per_id: int, milliseconds: int) -> Iterator[Imported]:
    for line in json_lines(path):
        length = line.integer("input_length", least=1)
        yield Imported(
            line=line.line,
            timestamp=line.number("timestamp") * milliseconds,
            input_length=length,
            output_length=line.integer("output_length"),
            ids=line.ids("hash_ids", length, tokens_per_id),
        )


def dynamo(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """Sessions as `python -m dynamo.replay` reads them in a Mooncake trace: a later turn has a delay or a time.

    A turn's prompt is whole. `created_time`, `input_tokens`, `output_tokens` and `delay_ms` are other names that
    Dynamo takes for `timestamp`, `input_length`, `output_length` and `delay`; times are milliseconds.
    """
    for line in json_lines(path):
        length = line.integer("input_length", "input_tokens", least=1)
        ids = None
        if line.values.get("hash_ids") is None:
            remarks.note(NO_CONTENT)
        else:
            ids = line.ids("hash_ids", length, options.tokens_per_id)
        yield Imported(
            line=line.line,
            timestamp=_optional(line, "timestamp", "created_time"),
            input_length=length,
            output_length=line.integer("output_length", "output_tokens"),
            ids=ids,
            session=_session(line),
            delay=_optional(line, "delay", "delay_ms"),
        )


def _optional(line: Fields, *names: str) -> float | None:
    return None if line.values.get(line.named(*names)) is None else line.number(*names)


def _session(line: Fields) -> str:
    value = line.values.get("session_id", "")
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise line.error("session_id", value, "a text or an integer")
    return str(value)


EMPTY = "rows without prompt tokens, left out: requests that failed"


def azure(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """AzurePublicDataset's LLM inference traces: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; the first is at 0."""
    first: datetime.datetime | None = None
    for row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        time = _time(row)
        first = first or time
        try:
            since = (time - first) / datetime.timedelta(milliseconds=1)
        except TypeError:
            raise row.error("TIMESTAMP", str(time), "a time with a zone on every row, or on none") from None
        length, output = _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens")
        if not length:
            remarks.note(EMPTY)
            continue
        yield Imported(line=row.line, timestamp=since, input_length=length, output_length=output)


def burst_gpt(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """BurstGPT's traces, with or without `Session ID`: `Timestamp` in seconds, `Request tokens`, `Response tokens`."""
    for row in csv_rows(path, ("Timestamp", "Request tokens", "Response tokens")):
        length, output = _tokens(row, "Request tokens"), _tokens(row, "Response tokens")
        if not length:
            remarks.note(EMPTY)
            continue
        yield Imported(line=row.line, timestamp=_seconds(row) * 1000, input_length=length, output_length=output)


def _time(row: Fields) -> datetime.datetime:
    value = row.values.get("TIMESTAMP")
    try:
        return datetime.datetime.fromisoformat(str(value))
    except ValueError:
        raise row.error("TIMESTAMP", value, "a time such as 2023-11-16 18:17:03.9799600") from None


def _tokens(row: Fields, name: str) -> int:
    value = row.values.get(name)
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 10:
        raise row.error(name, value, f"an integer from 0 to {MAX_LENGTH}")
    number = int(value)
    if number > MAX_LENGTH:
        raise row.error(name, value, f"an integer from 0 to {MAX_LENGTH}")
    return number


def _seconds(row: Fields) -> float:
    value = row.values.get("Timestamp")
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number <= 2**43:
        raise row.error("Timestamp", value, "a number of seconds from 0")
    return number

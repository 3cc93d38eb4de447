"""Traces of lengths and times alone: Azure's of 2023 and 2024, BurstGPT's. Nothing is known of what prompts share."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from hkv.replay.traces.imports.imported import MAX_LENGTH, Fields, Imported, ImportOptions, Remarks, csv_rows

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

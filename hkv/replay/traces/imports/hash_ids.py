"""Traces that name prompts by ids of blocks: Mooncake's, Bailian's, vLLM's timed traces, Dynamo's sessions."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.replay.traces.imports.imported import Fields, Imported, ImportOptions, Remarks, json_lines

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

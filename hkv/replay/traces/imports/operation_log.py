"""HKV's own operation logs as traces: the requests that arrived, with what they generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hkv.oracle.log_file import read_log
from hkv.replay.traces.imports.imported import Imported, ImportOptions, Remarks

EXTRA = "requests with an adapter, images, a salt or embeddings, left out: tokens alone do not name their prefixes"
SEQUENCES = "requests of several sequences, of which the first is taken"


def operation_log(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """The requests of a log, whichever dialect it follows; a log without `step` has one request a step."""
    log = read_log(path)
    steps, stepped = 0, any(_name(operation) == "step" for operation in log.operations)
    prompts: dict[str, tuple[int, float, list[int]]] = {}
    said: dict[str, list[int]] = {}
    for line, operation in enumerate(log.operations, start=2):
        name = _name(operation)
        steps += name == "step"
        if name == "request" and getattr(operation, "extra", None):
            remarks.note(EXTRA)
        elif name == "request":
            arrived = steps if stepped else len(prompts)
            prompts[operation.id] = (line, arrived * options.ms_per_step, _unsigned(operation.tokens))
            said[operation.id] = []
            if getattr(operation, "sequences", 1) > 1:
                remarks.note(SEQUENCES)
        elif name == "append" and operation.id in said:
            appended = operation.tokens
            said[operation.id] += _unsigned(appended[0] if appended and isinstance(appended[0], list) else appended)
    for id, (line, timestamp, tokens) in prompts.items():
        yield Imported(
            line=line,
            timestamp=timestamp,
            input_length=len(tokens),
            output_length=len(said[id]),
            tokens=tokens,
            output_tokens=said[id],
        )


def _name(operation: Any) -> str:
    """The operation's name in logs: the tag of its struct."""
    return str(operation.__struct_config__.tag)


def _unsigned(tokens: list[int]) -> list[int]:
    return [token % 2**32 for token in tokens]

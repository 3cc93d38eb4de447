"""Reading and writing operation logs. Whatever is wrong with a file becomes a FileError that says where and what."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from hkv.bugs import check_bugs
from hkv.dialects.rtp_llm.config import NAMES as RTP_LLM
from hkv.dialects.rtp_llm.log.structs import RtpOp
from hkv.dialects.vllm.config import NAME as VLLM
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import VERSIONS, to_config
from hkv.dialects.vllm.log.structs import Answer, Header, Operation
from hkv.errors import FileError, HKVError
from hkv.oracle.atomic import write_atomically

OPERATIONS: dict[str, type[Operation]] = {
    "step": oplog.StepOp,
    "request": oplog.RequestOp,
    "lookup": oplog.LookupOp,
    "allocate": oplog.AllocateOp,
    "advance": oplog.AdvanceOp,
    "append": oplog.AppendOp,
    "commit": oplog.CommitOp,
    "free": oplog.FreeOp,
    "drop": oplog.DropOp,
    "evict": oplog.EvictOp,
    "copies": oplog.CopiesOp,
    "reset": oplog.ResetOp,
    "events": oplog.EventsOp,
    "state": oplog.StateOp,
}
"""The operations, by their name in logs."""

COUNTS = ("new", "hit", "lookahead", "external", "reserved", "in_flight", "shared_prefix", "tokens")
LARGEST = 2**31 - 1
"""Largest token id, block id and count that a log may hold."""

EVENT_TYPES = ("stored", "removed", "cleared")

_DECODERS = {name: msgspec.json.Decoder(cls) for name, cls in OPERATIONS.items()}
_HEADER = msgspec.json.Decoder(Header)
_ANYTHING = msgspec.json.Decoder()


@dataclasses.dataclass(frozen=True)
class Log:
    """A log.

    Attributes:
      path: where it came from, as the caller named it.
      header: the configuration.
      operations: the operations in order; number `i` stands on line `i + 2`.
    """

    path: str
    header: Header
    operations: tuple[Operation, ...]


def find_logs(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files that `paths` name: each file itself, and every `*.jsonl` in a folder, sorted.

    Raises:
      FileError: a path does not exist, or a folder has no log.
    """
    found: list[str] = []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            inside = sorted(str(file) for file in path.rglob("*.jsonl"))
            if not inside:
                raise FileError(str(path), None, "", "a folder without logs", "at least one *.jsonl in it")
            found += inside
        elif path.exists():
            found.append(str(path))
        else:
            raise FileError(str(path), None, "", "no such file", "a log or a folder of logs")
    return found


def read_log(path: str | os.PathLike[str]) -> Log:
    """Reads and checks a log.

    Raises:
      FileError: the file cannot be read, or is no log; names file, line, field, value and what was expected.
    """
    return parse_log(read_bytes(path), str(path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file.

    Raises:
      FileError: it cannot be read.
    """
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise FileError(str(path), None, "", error.strerror or str(error), "a file that can be read") from error


def parse_log(data: bytes, path: str) -> Log:
    """The log that these bytes are; `path` is for messages only.

    Raises:
      FileError: they are none.
    """
    lines = split_lines(data, path)
    header = _parse_header(lines[0], path)
    lifecycle = Lifecycle(header)
    operations = []
    for number, line in enumerate(lines[1:], 2):
        operation = _parse_operation(line, path, number, header.oplog)
        try:
            lifecycle.follow(operation)
        except HKVError as error:
            raise FileError(path, number, error.argument, error.value, error.expected) from error
        lifecycle.answered(operation, getattr(operation, "want", None))
        operations.append(operation)
    return Log(path, header, tuple(operations))


def split_lines(data: bytes, path: str) -> list[bytes]:
    """The lines of a log, at least one.

    Raises:
      FileError: there is none.
    """
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise FileError(path, None, "", "an empty file", "a header on the first line")
    return lines


def write_log(
    path: str | os.PathLike[str], header: Header, operations: Sequence[Operation], answers: Sequence[Answer]
) -> None:
    """Writes operations with what an engine answered to them, whole or not at all."""
    write_atomically(path, log_bytes(header, operations, answers))


def log_bytes(header: Header, operations: Sequence[Operation], answers: Sequence[Answer]) -> bytes:
    """Content of the log of these operations, with what an engine answered to them."""
    lines = [msgspec.json.encode(header)]
    lines += [encode(operation, answer) for operation, answer in zip(operations, answers, strict=True)]
    return b"\n".join(lines) + b"\n"


def encode(operation: Operation | RtpOp, answer: Answer) -> bytes:
    """One line, without its newline."""
    fields = msgspec.to_builtins(operation)
    if "want" in type(operation).__struct_fields__:
        fields["want"] = encode_answer(answer)
    return msgspec.json.encode(fields)


def encode_answer(answer: Answer) -> Any:
    """An answer as JSON values, with the fields of events that logs always spell out."""
    if isinstance(answer, list) and answer and isinstance(answer[0], oplog.CacheEvent):
        return [_encode_event(event) for event in answer if isinstance(event, oplog.CacheEvent)]
    return msgspec.to_builtins(answer)


def _encode_event(event: oplog.CacheEvent) -> dict[str, Any]:
    if event.type == "cleared":
        return {"type": event.type}
    fields = {"type": event.type, "group": event.group, "num_blocks": event.num_blocks}
    return {**fields, **msgspec.to_builtins(event)}


def _parse_header(line: bytes, path: str) -> Header:
    found = parse_object(line, path, 1)
    if "oplog" not in found:
        raise FileError(path, 1, "oplog", None, f"a header with the version, one of {VERSIONS}")
    if type(found["oplog"]) is not int or found["oplog"] not in VERSIONS:
        raise FileError(path, 1, "oplog", found["oplog"], f"one of the versions {VERSIONS}")
    if found.get("dialect") in RTP_LLM:
        raise FileError(path, 1, "dialect", found["dialect"], f"{VLLM} here; hkv check reads logs of RTP-LLM's rules")
    header = decode(_HEADER, line, found, path, 1)
    for index, group in enumerate(header.groups):
        for name, value in group.items():
            _check_group_field(f"groups[{index}].{name}", name, value, path)
    for name in Header.__struct_fields__:
        value = getattr(header, name)
        if type(value) is int and value > LARGEST:
            raise FileError(path, 1, name, value, f"at most {LARGEST}")
    if not header.feature:
        raise FileError(path, 1, "feature", header.feature, "what the log is about, in a word")
    if not header.groups:
        raise FileError(path, 1, "groups", header.groups, "at least one group")
    try:
        check_bugs(frozenset(header.bugs))
        to_config(header)
    except HKVError as error:
        raise FileError(path, 1, error.argument, error.value, error.expected) from error
    return header


def _check_group_field(field: str, name: str, value: object, path: str) -> None:
    if name in ("kind", "cache_mode"):
        good, expected = isinstance(value, str), f"the name of a {'kind' if name == 'kind' else 'mode'}"
    elif name == "cp_sharded":
        good, expected = isinstance(value, bool), "true or false"
    else:
        good = value is None or (type(value) is int and 0 <= value <= LARGEST)
        expected = f"null or an integer from 0 to {LARGEST}"
    if not good:
        raise FileError(path, 1, field, value, expected)


def _parse_operation(line: bytes, path: str, number: int, version: int) -> Operation:
    found = parse_object(line, path, number)
    name = found.get("op")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise FileError(path, number, "op", name, f"one of {', '.join(OPERATIONS)}")
    operation = decode(_DECODERS[name], line, found, path, number)
    for field, value in _numbers(operation):
        if not 0 <= value <= LARGEST:
            raise FileError(path, number, field, value, f"from 0 to {LARGEST}")
    if "want" in type(operation).__struct_fields__ and getattr(operation, "want") is None:  # noqa: B009
        raise FileError(path, number, "want", None, "what the recorded engine answered")
    if isinstance(operation, oplog.EventsOp):
        _check_events(operation, path, number, version)
    if version == 1 and isinstance(operation, oplog.RequestOp) and operation.extra is not None:
        raise FileError(path, number, "extra", found["extra"], "version 2 of the log format")
    return operation


def _check_events(operation: oplog.EventsOp, path: str, number: int, version: int) -> None:
    types = EVENT_TYPES if version > 1 else EVENT_TYPES[:2]
    for index, event in enumerate(operation.want or ()):
        field = f"want[{index}]"
        if event.type not in types:
            raise FileError(path, number, f"{field}.type", event.type, f"one of {', '.join(types)}")
        for name in ("keys", "parent") if version == 1 else ():
            if getattr(event, name) is not None:
                raise FileError(path, number, f"{field}.{name}", getattr(event, name), "version 2 of the log format")


def _numbers(operation: Operation) -> Iterable[tuple[str, int]]:
    for field in type(operation).__struct_fields__:
        value = getattr(operation, field)
        if field in COUNTS and type(value) is int:
            yield field, value
        elif field in ("tokens", "blocks") and isinstance(value, list) and value:
            yield field, min(value)
            yield field, max(value)


def parse_object(line: bytes, path: str, number: int) -> dict[str, Any]:
    """The JSON object that one line of a log is.

    Raises:
      FileError: it is none.
    """
    try:
        found = _ANYTHING.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        text = line[:80].decode("utf-8", "replace")
        raise FileError(path, number, "", text, f"one JSON object ({error})") from error
    if not isinstance(found, dict):
        raise FileError(path, number, "", found, "one JSON object")
    return found


def decode(decoder: msgspec.json.Decoder[Any], line: bytes, found: object, path: str, number: int) -> Any:
    """One line as the typed value that a decoder makes; `found` is what `parse_object` says of it.

    Raises:
      FileError: a field is missing, unknown or of another type.
    """
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise _explain(str(error), found, path, number) from error


def _explain(message: str, found: object, path: str, number: int) -> FileError:
    message, _, where = message.partition(" - at ")
    field = where.strip("`").removeprefix("$").removeprefix(".")
    if named := re.match(r"Object (contains unknown|missing required) field `(.*)`", message):
        problem, name = named.groups()
        parent = _at(found, field)
        field = f"{field}.{name}" if field else name
        value = parent.get(name) if isinstance(parent, dict) else None
        expected = "no such field" if problem.startswith("contains") else "to be given"
        return FileError(path, number, field, value, expected)
    expected = re.sub(r"^Expected ", "", message).replace("`", "")
    return FileError(path, number, field, _at(found, field), expected)


def _at(found: object, field: str) -> object:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and index and int(index) < len(found):
            found = found[int(index)]
        else:
            return found
    return found

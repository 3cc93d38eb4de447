"""Reading and writing logs under RTP-LLM's rules."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.lifecycle import RtpLifecycle
from hkv.dialects.rtp_llm.log.configuration import to_rtp_config
from hkv.dialects.rtp_llm.log.structs import OPERATIONS, RtpAnswer, RtpHeader, RtpOp
from hkv.dialects.vllm.log.structs import Header
from hkv.errors import FileError, HKVError
from hkv.oracle.atomic import write_atomically
from hkv.oracle.log_file import LARGEST, Log, decode, log_bytes, parse_log, parse_object, read_bytes, split_lines

SMALLEST_TOKEN = -(2**31)
"""Tokens are hashed as int32, so a log may hold negative ones."""

_HEADER = msgspec.json.Decoder(RtpHeader)
_DECODERS = {name: msgspec.json.Decoder(cls) for name, cls in OPERATIONS.items()}


@dataclasses.dataclass(frozen=True)
class RtpLog:
    """A log under RTP-LLM's rules.

    Attributes:
      path: where it came from, as the caller named it.
      header: the configuration.
      operations: the operations in order; number `i` stands on line `i + 2`.
    """

    path: str
    header: RtpHeader
    operations: tuple[RtpOp, ...]


def read_any_log(path: str | os.PathLike[str]) -> Log | RtpLog:
    """Reads and checks a log, whichever rules its header names.

    Raises:
      FileError: the file cannot be read, or is no log.
    """
    return parse_any_log(read_bytes(path), str(path))


def parse_any_log(data: bytes, path: str) -> Log | RtpLog:
    """The log that these bytes are, whichever rules its header names; `path` is for messages only.

    Raises:
      FileError: they are none.
    """
    first = parse_object(split_lines(data, path)[0], path, 1)
    return (parse_rtp_log if first.get("dialect") in NAMES else parse_log)(data, path)


def write_any_log(
    path: str | os.PathLike[str], header: Header | RtpHeader, operations: Sequence[Any], answers: Sequence[Any]
) -> None:
    """Writes operations with what an engine answered to them, under the rules of their header, whole or not at all."""
    write_atomically(path, any_log_bytes(header, operations, answers))


def any_log_bytes(header: Header | RtpHeader, operations: Sequence[Any], answers: Sequence[Any]) -> bytes:
    """Content of the log of these operations, with what an engine answered to them, under the rules of their header."""
    if isinstance(header, RtpHeader):
        return rtp_log_bytes(header, operations, answers)
    return log_bytes(header, operations, answers)


def rtp_log_bytes(header: RtpHeader, operations: Sequence[RtpOp], answers: Sequence[RtpAnswer]) -> bytes:
    """Content of the log of these operations, with what an engine answered to them."""
    lines = [msgspec.json.encode(header)]
    for operation, answer in zip(operations, answers, strict=True):
        fields = msgspec.to_builtins(operation)
        if operation.answer_type is not None:
            fields["want"] = msgspec.to_builtins(answer)
        lines.append(msgspec.json.encode(fields))
    return b"\n".join(lines) + b"\n"


def parse_rtp_log(data: bytes, path: str) -> RtpLog:
    """The log that these bytes are; `path` is for messages only.

    Raises:
      FileError: they are none; names file, line, field, value and what was expected.
    """
    lines = split_lines(data, path)
    header = _parse_header(lines[0], path)
    lifecycle = RtpLifecycle()
    operations = []
    for number, line in enumerate(lines[1:], 2):
        operation = _parse_operation(line, path, number)
        try:
            lifecycle.follow(operation)
        except HKVError as error:
            raise FileError(path, number, error.argument, error.value, error.expected) from error
        lifecycle.answered(operation, getattr(operation, "want", None))
        operations.append(operation)
    return RtpLog(path, header, tuple(operations))


def _parse_header(line: bytes, path: str) -> RtpHeader:
    header = decode(_HEADER, line, parse_object(line, path, 1), path, 1)
    for name, value in _numbers(msgspec.to_builtins(header)):
        if not 0 <= value <= LARGEST:
            raise FileError(path, 1, name, value, f"from 0 to {LARGEST}")
    if not header.feature:
        raise FileError(path, 1, "feature", header.feature, "what the log is about, in a word")
    try:
        to_rtp_config(header)
    except HKVError as error:
        raise FileError(path, 1, error.argument, error.value, error.expected) from error
    return header


def _parse_operation(line: bytes, path: str, number: int) -> RtpOp:
    found = parse_object(line, path, number)
    name = found.get("op")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise FileError(path, number, "op", name, f"one of {', '.join(OPERATIONS)}")
    operation = decode(_DECODERS[name], line, found, path, number)
    for field, value in _numbers({key: value for key, value in found.items() if key != "want"}):
        least = SMALLEST_TOKEN if field == "tokens" else 0
        if not least <= value <= LARGEST:
            raise FileError(path, number, field, value, f"from {least} to {LARGEST}")
    if operation.answer_type is not None and getattr(operation, "want", None) is None:
        raise FileError(path, number, "want", None, "what the recorded engine answered")
    return operation


def _numbers(fields: dict[str, Any]) -> Iterable[tuple[str, int]]:
    """Every integer in a line, with the name of its field."""
    for name, value in fields.items():
        yield from ((name, number) for number in _integers(value))


def _integers(value: Any) -> Iterable[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _integers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner)

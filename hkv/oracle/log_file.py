"""Reading and writing operation logs. Whatever is wrong with a file becomes a FileError that says where and what."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import msgspec

from hkv.contract import registry
from hkv.contract.dialect import Dialect
from hkv.contract.log import Log, check_answered, parse_object
from hkv.errors import FileError, HKVError, MissingExtraError
from hkv.files import STANDARD_INPUT, OutputFile, lines_of, naming, opened


def find_logs(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files that `paths` name: each file itself, and every log in a folder, sorted; `-` is standard input.

    Logs end in `.jsonl`, `.jsonl.gz` or `.jsonl.zst`; later parts of a log are not logs of their own. FileError for a
    path that does not exist, or a folder without logs.
    """
    found: list[str] = []
    for path in map(pathlib.Path, paths):
        if str(path) == STANDARD_INPUT:
            found.append(STANDARD_INPUT)
        elif path.is_dir():
            files = (file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}"))
            inside = sorted(str(file) for file in files if not re.search(r"\.part\d+\.jsonl", file.name))
            if not inside:
                raise FileError(str(path), None, "", "a folder without logs", "at least one *.jsonl in it")
            found += inside
        elif path.exists():
            found.append(str(path))
        else:
            raise FileError(str(path), None, "", "no such file", "a log or a folder of logs")
    return found


Answering = Callable[[Any], Callable[[Any], Any]]
"""Answers operations under a header, each in turn."""


def read_log(path: str | os.PathLike[str], answering: Answering | None = None) -> Log:
    """A log, whichever dialect its header names; FileError says where it is none, and what was expected.

    Every operation is to hold its answer, unless there is an `answering`, whose answers take the missing ones' place.
    """
    return _parse(_lines_of_parts(pathlib.Path(path)), str(path), answering)


def _lines_of_parts(path: pathlib.Path) -> Iterator[bytes]:
    parts = itertools.takewhile(pathlib.Path.exists, (part_path(path, number) for number in itertools.count(1)))
    for part in itertools.chain([path], parts):
        with opened(str(part)) as file:
            yield from lines_of(file, str(part))


def part_path(path: pathlib.Path, part: int) -> pathlib.Path:
    """File of a log's part: the log's own for part 0, then `NAME.part1.jsonl` and so on, compressed as it is."""
    if part == 0:
        return path
    stem, _, rest = path.name.partition(".jsonl")
    return path.with_name(f"{stem}.part{part}.jsonl{rest}")


def parse_log(data: bytes, path: str) -> Log:
    """The log that these bytes are; `path` is for messages only."""
    return _parse(lines_of(io.BytesIO(data), path), path)


def _parse(content: Iterator[bytes], path: str, answering: Answering | None = None) -> Log:
    """The log of these lines, which are read one by one: a file that is no log is refused at its first line."""
    stripped = (line.removesuffix(b"\n") for line in content)
    first = next(stripped, None)
    if first is None:
        raise FileError(path, None, "", "an empty file", "a header on the first line")
    found = parse_object(first, path, 1)
    dialect = _dialect_of(found)
    header = dialect.log.parse_header(first, found, path)
    lifecycle = dialect.lifecycle(header)
    answer = None if answering is None else answering(header)
    operations = []
    for number, line in enumerate(stripped, 2):
        operation = dialect.log.parse_operation(line, path, number, header)
        if answer is None:
            check_answered(operation, path, number)
        try:
            lifecycle.follow(operation)
            given = None if answer is None else answer(operation)
        except HKVError as error:
            raise FileError(path, number, error.argument, error.value, error.expected) from error
        if given is not None and operation.want is None:
            operation = msgspec.structs.replace(operation, want=given)
        lifecycle.answered(operation, getattr(operation, "want", None))
        operations.append(operation)
    return Log(path, header, tuple(operations))


def _dialect_of(found: dict[str, Any]) -> Dialect:
    """Dialect that a header names; the default one where it names none, whose format then reports the mistake."""
    try:
        return registry.dialect_of(found.get("dialect"))
    except HKVError:
        return registry.dialect_of(registry.DEFAULT)


def write_log(path: str | os.PathLike[str], header: Any, operations: Sequence[Any], answers: Sequence[Any]) -> None:
    """Writes operations with what an engine answered to them, whole or not at all."""
    write_atomically(path, log_bytes(header, operations, answers))


def log_bytes(header: Any, operations: Sequence[Any], answers: Sequence[Any]) -> bytes:
    """Content of the log of these operations, with what an engine answered to them."""
    dialect = registry.dialect_of(header.dialect)
    lines = [msgspec.json.encode(header)]
    lines += [encode(dialect, operation, answer) for operation, answer in zip(operations, answers, strict=True)]
    return b"\n".join(lines) + b"\n"


def encode(dialect: Dialect, operation: Any, answer: Any) -> bytes:
    """One line, without its newline."""
    fields = msgspec.to_builtins(operation)
    if "want" in type(operation).__struct_fields__:
        fields["want"] = dialect.log.encode_answer(answer)
    return msgspec.json.encode(fields)


# Logs written as compressed files: gzip and Zstandard, by the ends of their names.

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Ends of the names of logs."""


def open_output(path: pathlib.Path) -> BinaryIO:
    """A new file to write a log to, compressed as its name says."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=4))
    if path.suffix == ".zst":
        return cast(BinaryIO, zstandard().open(path, "wb"))
    return cast(BinaryIO, path.open("wb", buffering=0))


def zstandard() -> Any:
    """The package of that name."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise MissingExtraError("zstandard", "traces", "for logs that end in .zst") from None


# Writes files whole or not at all.


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file at `path`, making its folder if need be; a reader sees the old bytes or all of the new ones.

    A device or a pipe at `path` is written as a stream: see `hkv.files.OutputFile`.
    """
    write_all_atomically({path: data})


def write_all_atomically(files: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Replaces several files, given by path, once all of them are written next to their places; else none of them."""
    with contextlib.ExitStack() as stack:
        opened: list[OutputFile] = []
        for path, data in files.items():
            with naming(str(path)):
                pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            output = OutputFile(path)
            stack.callback(output.discard)
            opened.append(output)
            output.file.write(data)
            output.close()
        for output in opened:
            output.commit()

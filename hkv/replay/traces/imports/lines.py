"""Lines of JSON and rows of CSV, one at a time, from what may be compressed or a pipe."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator

import msgspec

from hkv.errors import FileError
from hkv.replay.traces.imports.imported import Fields
from hkv.replay.traces.source import opened, shown


def json_lines(path: str) -> Iterator[Fields]:
    """The objects of a file of JSON lines; empty lines are passed over.

    Raises:
      FileError: the file cannot be read, or a line is no object.
    """
    with opened(path) as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield Fields(path, number, _object(path, number, text))


def _object(path: str, number: int, text: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        told = text[:80].decode("utf-8", "replace").strip()
        raise FileError(shown(path), number, "", told, f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise FileError(shown(path), number, "", value, "a JSON object")
    return value


def json_entries(path: str) -> Iterator[Fields]:
    """The objects of a file that is one JSON list, or has one a line; numbered from 1.

    Raises:
      FileError: the file cannot be read, or has something else.
    """
    with opened(path) as file:
        text = file.read()
    if not text.lstrip().startswith(b"["):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield Fields(path, number, _object(path, number, line))
        return
    try:
        entries = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(shown(path), None, "", text[:80].decode("utf-8", "replace"), f"JSON ({error})") from None
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise FileError(shown(path), number, "", entry, "a JSON object")
        yield Fields(path, number, entry)


def csv_rows(path: str, columns: tuple[str, ...]) -> Iterator[Fields]:
    """The rows of a CSV file with a heading that has at least these columns, which are numbered from line 2.

    Raises:
      FileError: the file cannot be read, is not UTF-8, or lacks a column.
    """
    with opened(path) as file:
        try:
            rows = csv.reader(codecs.iterdecode(file, "utf-8-sig"))
            names = next(rows, [])
            for column in columns:
                if column not in names:
                    raise FileError(shown(path), 1, "", names, f"a heading with the column {column!r}")
            for row in rows:
                if row:
                    yield Fields(path, rows.line_num, dict(zip(names, row, strict=False)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise FileError(shown(path), None, "", str(error), "CSV in UTF-8") from None

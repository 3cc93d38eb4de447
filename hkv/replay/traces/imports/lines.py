"""Lines of JSON and rows of CSV, one at a time, from what may be compressed or a pipe."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator

from hkv.errors import FileError
from hkv.input_file import decode_json, lines_of, opened, read_whole, shown
from hkv.replay.traces.imports.imported import Fields


def json_lines(path: str) -> Iterator[Fields]:
    """The objects of a file of JSON lines; empty lines are passed over.

    Raises:
      FileError: the file cannot be read, or a line is no object.
    """
    with opened(path) as file:
        for number, text in enumerate(lines_of(file, path), start=1):
            if text.strip():
                yield Fields(path, number, _object(path, number, text))


def text_lines(path: str) -> Iterator[tuple[int, str]]:
    """Lines of text that are not empty, without their ends, with their numbers.

    Raises:
      FileError: the file cannot be read, or is not UTF-8.
    """
    with opened(path) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise FileError(shown(path), number, "", str(error), "text in UTF-8") from None
            if text.strip():
                yield number, text


def _object(path: str, number: int, text: bytes) -> dict[str, object]:
    value = decode_json(text, path, number, "a JSON object")
    if not isinstance(value, dict):
        raise FileError(shown(path), number, "", value, "a JSON object")
    return value


def json_entries(path: str) -> Iterator[Fields]:
    """The objects of a file that is one JSON list, or has one a line; numbered from 1.

    Raises:
      FileError: the file cannot be read, or has something else.
    """
    text = read_whole(path)
    if not text.lstrip().startswith(b"["):
        for number, line in enumerate(lines_of(io.BytesIO(text), path), start=1):
            if line.strip():
                yield Fields(path, number, _object(path, number, line))
        return
    entries = decode_json(text, path, None, "JSON")
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

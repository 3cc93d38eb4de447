"""Requests as importers yield them, and the options that importers take."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

from hkv.errors import ConfigError, FileError
from hkv.files import decode_json, lines_of, opened, read_whole, shown

MAX_LENGTH = 2**31 - 1
"""Most tokens a prompt or an output may have."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Imported:
    """One request as its source gives it.

    Attributes:
      line: 1-based line, row or entry of the source, for messages.
      timestamp: arrival in milliseconds; None where the source gives no time.
      input_length: tokens of the prompt, at least 1.
      output_length: tokens that it generates.
      ids: one for every `tokens_per_id` tokens of the prompt, of blocks or of prefixes; None where there are none.
      tokens: the prompt's tokens, or None.
      output_tokens: tokens that it generated, or None.
      session: requests of one session follow each other; "" for a request by itself.
      delay: milliseconds from the end of the session's request before it, where the source says that and no time.
    """

    line: int
    timestamp: float | None
    input_length: int
    output_length: int
    ids: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    output_tokens: Sequence[int] | None = None
    session: str = ""
    delay: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of formats, besides the source. None and "" stand for not being told.

    Attributes:
      tokens_per_id: tokens that one of the source's ids stands for, where it has ids.
      tokenizer: path of a `tokenizer.json`.
      template: name of what stands around messages, one of `hkv.replay.traces.imports.texts.TEMPLATES`.
      output_tokens: tokens of an answer that the source does not give.
      answers: path of a second file with the answers.
      group: index of the KV cache group whose events are read.
      ms_per_step: milliseconds of a step of an operation log.
    """

    tokens_per_id: int = 1
    tokenizer: str = ""
    template: str = "plain"
    output_tokens: int | None = None
    answers: str = ""
    group: int = 0
    ms_per_step: int = 50


@dataclasses.dataclass
class Remarks:
    """Things that an import left out or could not know, to be reported to the user: text to count."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def note(self, remark: str, count: int = 1) -> None:
        """Counts something once more."""
        self.counts[remark] = self.counts.get(remark, 0) + count


class Fields:
    """The named fields of one line, row or entry; what is wrong with one of them is told by place, name and value."""

    def __init__(self, path: str, line: int, values: dict[str, Any]) -> None:
        self.path, self.line, self.values = path, line, values

    def error(self, field: str, value: object, expected: str) -> FileError:
        """The error to raise."""
        return FileError(shown(self.path), self.line, field, value, expected)

    def named(self, *names: str) -> str:
        """The first of these names that is there; the first of all where none is."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def integer(self, *names: str, least: int = 0) -> int:
        """An integer under one of these names."""
        name = self.named(*names)
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= MAX_LENGTH:
            raise self.error(name, value, f"an integer from {least} to {MAX_LENGTH}")
        return value

    def number(self, *names: str) -> float:
        """A finite number of at least 0 under one of these names."""
        name = self.named(*names)
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 2**53:
            raise self.error(name, value, "a number from 0 to 2**53")
        return value

    def ids(self, name: str, length: int, tokens_per_id: int) -> list[int]:
        """Ids that stand for `tokens_per_id` tokens each of so many, the last perhaps for fewer, or absent then."""
        values = self.values.get(name)
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise self.error(name, values, "a list of non-negative integers")
        counts = sorted({length // tokens_per_id, -(-length // tokens_per_id)})
        if len(values) not in counts:
            wanted = " or ".join(map(str, counts))
            expected = f"{wanted} of them, one for every {tokens_per_id} (--tokens-per-id) of the {length} tokens"
            raise self.error(name, f"{len(values)} ids", expected)
        return values


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
                yield Fields(path, number, _object(path, number, text))


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


def _object(path: str, number: int, text: bytes) -> dict[str, object]:
    value = decode_json(text, path, number, "a JSON object")
    if not isinstance(value, dict):
        raise FileError(shown(path), number, "", value, "a JSON object")
    return value


def json_entries(path: str) -> Iterator[Fields]:
    """The objects of a file that is one JSON list, or has one a line; numbered from 1."""
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

"""Options that name a file to write: `-` is standard output, and what cannot be written is refused before any work."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import pathlib
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from hkv.contract.options import option
from hkv.errors import FileError
from hkv.files import printable
from hkv.oracle.log_file import write_atomically

STANDARD_OUTPUT = "-"

_TAKEN = "hkv.cli.output_option.taken"


class OutputPath(click.ParamType):
    """A file to write, or `-`; a path that is standard output's own, such as `/dev/stdout`, is read as `-` too."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = os.fspath(value)
        if path.startswith("--"):
            self.fail(f"{path!r} is an option; a file to write comes first, - for standard output", param, ctx)
        if path != STANDARD_OUTPUT and not _is_standard_output(path):
            _check(path)
            return path
        if ctx is not None:
            names = [*ctx.meta.get(_TAKEN, ()), param.opts[-1] if param is not None and param.opts else "-"]
            ctx.meta[_TAKEN] = names
            if len(set(names)) > 1:
                raise click.UsageError(f"only one result can go to standard output, not {' and '.join(names)}")
        return STANDARD_OUTPUT


class OutputFolder(click.ParamType):
    """A folder to write files in, made if need be."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = os.fspath(value)
        if path in ("", "-") or (os.path.exists(path) and not os.path.isdir(path)):
            raise FileError(path or "''", None, "", "no folder", "the name of a folder to write in")
        _check(os.path.join(path, "file"))
        return path


def console(wide: bool = True, **settings: Any) -> Console:
    """A console of the terminal's width; `wide`, wide enough for every table where there is no terminal."""
    width = 110 if wide and not sys.stdout.isatty() else None
    return _Console(width=width, file=getattr(sys.stdout, "styled", None), **settings)


class _Console(Console):
    """A console whose own codes reach the terminal, and none of the texts that it prints."""

    def print(self, *objects: Any, **named: Any) -> None:
        for each in objects:
            if isinstance(each, Table):  # a number that is cut is another number: no column is narrower than a word
                for column in each.columns:
                    texts = [str(cell) for cell in (column.header, *column.cells)]
                    parts = (part for text in texts for part in (text.splitlines() if column.no_wrap else text.split()))
                    column.min_width = max(map(cell_len, parts), default=None)
                least = Measurement.get(self, self.options.update(width=1000), each).minimum
                self.width = max(self.width, least)
        super().print(*objects, **named)

    def render(self, *arguments: Any, **named: Any) -> Iterable[Segment]:
        for each in super().render(*arguments, **named):
            yield each if each.control else each._replace(text=printable(each.text))


def table(columns: str, rows: Iterable[Iterable[object]] = (), **settings: Any) -> Table:
    """A table, its columns between `|`; the right-justified ones begin with `>`, those that are not broken with `=`."""
    made = Table(title_justify="left", **settings)
    for name in columns.split("|"):
        made.add_column(name.lstrip(">="), justify="right" if name[:1] == ">" else "left", no_wrap=name[:1] == "=")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def talks(*paths: str | None) -> bool:
    """True if a command may print for people: none of its results goes to standard output."""
    return STANDARD_OUTPUT not in paths


def write_output(path: str, data: bytes) -> None:
    """Writes a result where an `OutputPath` says; FileError where it cannot."""
    if path != STANDARD_OUTPUT:
        write_atomically(path, data)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def _check(path: str) -> None:
    """Refuses what would fail once the work is done; what changes until then, and full disks, fail there."""
    if not path:
        raise FileError("''", None, "", "an empty name", "the name of a file to write")
    target = pathlib.Path(os.path.realpath(path))
    reason = None
    if os.path.isdir(path) or path.endswith("/"):
        reason = "Is a directory"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        reason = "Permission denied"
    elif not os.path.exists(path) or os.path.isfile(path):
        folder = next((one for one in target.parents if os.path.lexists(one)), pathlib.Path("/"))
        if not folder.is_dir():
            reason = "Not a directory"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = "Permission denied"
    if reason is not None:
        raise FileError(path, None, "", reason, "a path that can be written")


def _is_standard_output(path: str) -> bool:
    try:
        found, own = os.stat(path), os.fstat(1)
    except OSError:
        return False
    return not stat.S_ISDIR(found.st_mode) and os.path.samestat(found, own)


# The `--json` option of every command.

_JSON: Mapping[str, Any] = {
    "metavar": "F",
    "type": OutputPath(),
    "help": "Write the result as JSON to the file F; - for standard output, which then has nothing else.",
}

json_option = click.option("--json", "json_path", **_JSON)
"""Adds the option to a command that is no dataclass of options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reported:
    """The option that every command has besides its own."""

    json_path: str | None = option(None, "--json", **_JSON)


def output_field(metavar: str, what: str) -> Any:
    """A field for `-o`, the file that a command is there for."""
    said = f"{what} to write; - for standard output."
    return option(None, "-o", "--output", required=True, metavar=metavar, type=OutputPath(), help=said)


def plot_field(said: str, metavar: str = "FILE") -> Any:
    """A field for `--plot`."""
    return option(None, "--plot", metavar=metavar, type=OutputPath(), help=said)


def write_json(path: str | None, result: Any) -> None:
    """Writes a result as indented JSON to a file, whole or not at all, or to standard output for `-`."""
    if path is not None:
        write_output(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


# Standard output that cannot fail without being noticed.


class StandardOutputError(Exception):
    """Standard output took no more. It is no OSError, because rich and click treat broken pipes in ways of their own.

    Where it is `closed`, its reader has gone, as `head` does; `reason` says it in words.
    """

    def __init__(self, cause: OSError) -> None:
        self.closed = cause.errno == errno.EPIPE
        self.reason = cause.strerror or str(cause)
        super().__init__(self.reason)


class _Watched(io.RawIOBase):
    """A descriptor that remembers its first failure, and swallows all that comes after it.

    Python writes what is buffered once more while it shuts down, where a failure is a message and exit status 120.
    """

    def __init__(self, descriptor: int | None) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.failure: StandardOutputError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._descriptor

    def isatty(self) -> bool:
        return self._descriptor is not None and os.isatty(self._descriptor)

    def write(self, data: object) -> int:  # type: ignore[override]
        view = memoryview(data)  # type: ignore[arg-type]
        if self.failure is not None:
            return view.nbytes
        try:
            return os.write(self.fileno(), view)
        except OSError as error:
            self.failure = StandardOutputError(error)
            raise self.failure from error


class _Printable(io.TextIOWrapper):
    """Text whose control characters are written as escapes: ids and errors are strangers', and terminals obey.

    Attributes:
      styled: the same without that, for a console's own codes.
    """

    @property
    def styled(self) -> Any:
        return _Styled(self)

    def write(self, text: str) -> int:
        super().write(printable(text))
        return len(text)


class _Styled:
    def __init__(self, stream: _Printable) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)


@contextlib.contextmanager
def standard_output(descriptor: int | None) -> Iterator[None]:
    """Makes `sys.stdout` write to a descriptor, in its old encoding, and raise StandardOutputError where that fails.

    Characters that the encoding lacks, and those that a terminal obeys, are written as escapes. What is buffered is
    written on leaving, and a failure that was caught and forgotten in between is raised there. Without a descriptor
    nothing can be written.
    """
    before = sys.stdout
    raw = _Watched(descriptor)
    sys.stdout = _Printable(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=raw.isatty(),
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout = before
            if raw.failure is not None:
                raise raw.failure

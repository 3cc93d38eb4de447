"""Rows of a sweep in a file, a line of JSON each, so that a sweep that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec

from hkv.errors import FileError
from hkv.input_file import decode_json
from hkv.replay.points import Point
from hkv.replay.sweep import Row
from hkv.replay.traces.interned import InternedTrace
from hkv.version import __version__

NOT_ASKED = ("trace", "json_path", "plot_path", "check", "ceilings")
"""Options that say nothing about what a replay finds; the trace is known by its content."""


class ResultsFile:
    """Rows of points that were measured, by a digest of all that they depend on."""

    def __init__(self, path: str | None, trace: InternedTrace) -> None:
        self._path = path
        self._trace = hashlib.sha256(msgspec.json.encode(trace.requests)).hexdigest() if path else ""
        self._done = {} if path is None else _earlier(path)

    def row(self, point: Point) -> Row | None:
        """The row of a point that was measured before."""
        found = self._done.get(self._key(point))
        return None if found is None else {**found, "options": dict(point.labels)}

    def add(self, point: Point, row: Row) -> None:
        """Writes the row of a point that has just been measured."""
        if self._path is None:
            return
        with open(self._path, "ab") as file:
            file.write(msgspec.json.encode({"key": self._key(point), **row}) + b"\n")

    def _key(self, point: Point) -> str:
        asked = {name: value for name, value in point.options.items() if name not in NOT_ASKED}
        depends = (
            __version__,
            self._trace,
            sorted(asked.items()),
            point.timing,
            point.engine,
            point.infinite,
            point.warmup,
        )
        return hashlib.sha256(repr(depends).encode()).hexdigest()[:16]


def _earlier(path: str) -> dict[str, Row]:
    """Rows of an earlier run by their keys."""
    done: dict[str, Row] = {}
    if not os.path.exists(path):
        return done
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        row = decode_json(line, path, number, "a point", dict[str, Any])
        if "key" not in row:
            raise FileError(path, number, "key", None, "the key of a point")
        done[row.pop("key")] = row
    if lines[-1]:
        raise FileError(path, len(lines), "", lines[-1][:60].decode("utf-8", "replace"), "a whole line")
    return done

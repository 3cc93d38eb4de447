"""Traces of a command that ended: the one line that it complains in, and the files that it left."""

from __future__ import annotations

import pathlib

import pytest


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    error = capsys.readouterr().err
    assert error.startswith("hkv: "), error
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    return error


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(folder: pathlib.Path) -> pathlib.Path:
    """A folder beside the one that is looked at, for what else a command writes."""
    other = folder / "other"
    other.mkdir()
    return other


def target(folder: pathlib.Path, option: str) -> pathlib.Path:
    """Path for an output option: a file of a suffix that it takes, or for "" and `--save` of `diff` a folder."""
    return folder / ("result.svg" if option in ("--image", "--plot") else "result")

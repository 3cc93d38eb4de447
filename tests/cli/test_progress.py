"""Progress where standard error is no terminal: a line now and then, none of what ends at once."""

from __future__ import annotations

import time

import pytest

from hkv.cli import progress
from hkv.cli.progress import counting_bar, level_bar, progress_bar


def lines(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    """Waits until the line is there: it comes from another thread."""
    deadline, found = time.monotonic() + 20, ""
    while expected not in found and time.monotonic() < deadline:
        time.sleep(0.005)
        found += capsys.readouterr().err
    assert expected in found.splitlines()


def test_lines_say_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    with progress_bar("watching", 1500) as advance:
        lines(capsys, "watching")
        for _ in range(1200):
            advance()
        lines(capsys, "watching: 1,200 of 1,500")
    with counting_bar("shrinking", 20, "operations left") as sink:
        sink(7)
        lines(capsys, "shrinking: 7 operations left")
    with level_bar("compiling") as told:
        lines(capsys, "compiling")
        told("level 3", 0.25)
        lines(capsys, "level 3: 25%")


def test_what_ends_at_once_says_nothing(capsys):
    with progress_bar("watching", 2) as advance:
        advance()
    assert capsys.readouterr().err == ""

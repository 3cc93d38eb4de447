"""Each file of `on_eight_devices` in a process of its own."""

from __future__ import annotations

import pathlib

import pytest

from tests.slow.sharding.eight_devices import run_tests

FILES = sorted((pathlib.Path(__file__).parent / "on_eight_devices").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file(path: pathlib.Path) -> None:
    run_tests(path)

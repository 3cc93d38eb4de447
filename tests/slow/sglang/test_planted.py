"""Every defect planted in the reference under SGLang's rules is found, and so many first lines name the cause."""

from __future__ import annotations

import pathlib
import re

from tests.sglang import planted

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "tables" / "planted-in-sglang.md"


def test_first_lines_are_those_of_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert planted.page() == page
    counts = re.search(r"^(\d+) of (\d+) found, (\d+) first lines name the cause", page, re.MULTILINE)
    assert counts is not None
    found, rows, named = map(int, counts.groups())
    assert found == rows == len(planted.defects())
    assert named >= 51

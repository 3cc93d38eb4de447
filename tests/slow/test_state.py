"""`docs/cache.md`: its pictures show what the code draws."""

from __future__ import annotations

import pathlib
import re
from types import ModuleType

import pytest

from tests.scripts import load_script

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'hkv[plots]'")
    return load_script(DOCS / "pictures" / "draw_state.py")


def labels(path: pathlib.Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_pictures_are_current(pictures: ModuleType, tmp_path: pathlib.Path) -> None:
    pictures.main([str(tmp_path)])
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.name for path in drawn] == sorted(path.name for path in (DOCS / "pictures").glob("state-*.svg"))
    for path in drawn:
        assert len(labels(path)) > 10
        assert labels(path) == labels(DOCS / "pictures" / path.name)

"""`docs/cache.md` and `docs/radix.md`: their pictures show what the code draws."""

from __future__ import annotations

import pathlib
import re
from types import ModuleType

import pytest

from tests.scripts import load_script

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'hkv[plots]'")
    return load_script(DOCS / "pictures" / f"draw_{name}.py")


def labels(path: pathlib.Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("name", ["state", "radix"])
def test_pictures_are_current(name: str, tmp_path: pathlib.Path) -> None:
    script(name).main([str(tmp_path)])
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.name for path in drawn] == sorted(path.name for path in (DOCS / "pictures").glob(f"{name}-*.svg"))
    for path in drawn:
        assert len(labels(path)) > 10
        assert labels(path) == labels(DOCS / "pictures" / path.name)

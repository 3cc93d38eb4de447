"""docs/released-models.md and docs/models.md say what the code says."""

from __future__ import annotations

import pathlib

from benchmarks import released_tables
from tests.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_the_document_of_released_models_is_current() -> None:
    written = (ROOT / "docs" / "released-models.md").read_text(encoding="utf-8")
    assert written == released_tables.document(), "run: python benchmarks/released_tables.py"


def test_the_document_of_models_is_current() -> None:
    module = load_script(ROOT / "benchmarks" / "model_tables.py")
    written = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == module.document(), "run: python benchmarks/model_tables.py"

"""docs/models.md says what the code says."""

from __future__ import annotations

import pathlib

from tests.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_the_document_of_models_is_current() -> None:
    module = load_script(ROOT / "benchmarks" / "model_tables.py")
    written = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == module.document(), "run: python benchmarks/model_tables.py"

"""docs/models.md says what the code says."""

from __future__ import annotations

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_the_document_of_models_is_current() -> None:
    location = ROOT / "benchmarks" / "model_tables.py"
    spec = importlib.util.spec_from_file_location("model_tables", location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == module.document(), "run: python benchmarks/model_tables.py"

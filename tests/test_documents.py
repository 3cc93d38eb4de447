"""`docs/new-engine-version.md`: its tables are the code's, and its delta of a dialect runs."""

from __future__ import annotations

import pathlib
import re

import pytest

from hkv.oracle.engines import engine_factory
from hkv.oracle.record import Only, differ
from tests.scripts import load_script

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = DOCS / "new-engine-version.md"


def test_tables_are_written_by_the_script() -> None:
    page = PAGE.read_text()
    assert load_script(DOCS / "write_tables.py").written(page) == page, "run python docs/write_tables.py"
    for row in ("| 0 | `OK` |", "| `OperationError` | `HKVError` |"):
        assert row in page


@pytest.mark.parametrize(("kind", "differs"), [("full_attention", False), ("sliding_window", True)])
def test_the_delta_of_a_dialect_differs_where_its_rule_does(tmp_path: pathlib.Path, kind: str, differs: bool) -> None:
    code = re.findall(r"```python\n# vllm_next.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "vllm_next.py"
    path.write_text(code[0])
    changed, old = engine_factory(f"{path}:NextEngine"), engine_factory("numpy")
    found = [differ(changed, old, "core", seed, 2, 16, only=Only(frozenset({kind}))) for seed in range(6)]
    assert any(parted is not None for _, parted in found) == differs

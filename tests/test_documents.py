"""Python blocks of README and of every page run; tables that are written from the code are the code's."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil

import pytest

from benchmarks.quoted.console import difference, shown_in
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import Only, differ
from tests.cli.commands import perform
from tests.scripts import load_script

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = DOCS / "versions.md"


def test_tables_are_written_by_the_script() -> None:
    page = (DOCS / "versions.md").read_text()
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


PAGES = sorted(path.stem for path in DOCS.glob("*.md") if "```python\n" in path.read_text())
MESH = "\n## Several devices\n"
"""Heading of the part of `docs/serving.md` whose code wants a mesh."""

ELSEWHERE = {
    "lowering": ("tests/lowering/test_page.py",),
    "serving": ("tests/slow/serving/test_tiers.py", "tests/slow/sharding/on_eight_devices/test_resharding.py"),
}
"""Pages whose code compiles large programs, or wants a mesh or a module to stand in, and what runs them."""


def run_page(page: str, until: str | None = None, since: str = "") -> dict[str, object]:
    """Names after the Python blocks of a page, or of its part between two lines, each block run after those before."""
    names: dict[str, object] = {"__name__": f"docs.{page}"}
    text = (DOCS / f"{page}.md").read_text()
    text = text[text.index(since) : None if until is None else text.index(until)]
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, f"docs/{page}.md", "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS.parent / "examples"))
    run_page(page)


def test_pages_that_run_elsewhere_do() -> None:
    for page, tests in ELSEWHERE.items():
        assert page in PAGES
        assert all(f'run_page("{page}"' in (DOCS.parent / test).read_text() for test in tests)


def test_the_python_of_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    readme = DOCS.parent / "README.md"
    run_page("../README")
    (said,) = re.findall(r"^print\(.*?\) +# (.*)$", readme.read_text(), re.MULTILINE)
    assert capsys.readouterr().out == f"{said}\n"


def test_the_commands_of_a_first_log_print_what_they_say(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `docs/my-engine.md`, on the logs that its Python writes."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DOCS.parent / "examples" / "data", tmp_path / "examples" / "data")
    run_page("my-engine")
    shown = shown_in((DOCS / "my-engine.md").read_text())
    assert len(shown) == 5
    for each in shown:
        done = perform(shlex.split(each.command)[1:], tmp_path)
        assert (problem := difference(each, done.out.decode())) is None, problem


def test_no_line_of_a_page_is_a_link_by_accident() -> None:
    """Outside code, `a[0][0]` is a link by reference to a page `0`, which `mkdocs build --strict` refuses."""
    for path in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        bare = re.sub(r"(`+)(?:(?!\1).)+\1|^ {4}.*", "", text, flags=re.MULTILINE)
        assert re.search(r"(?<!\\)\]\[", bare) is None, path

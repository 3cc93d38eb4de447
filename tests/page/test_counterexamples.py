"""Pages of counterexamples: drawn is the cache that breaks the invariant, with the state that breaks it."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.oracle.engines import engine_factory
from hkv.oracle.history import history
from hkv.oracle.log_file import read_log
from hkv.oracle.side import FREE, HELD
from hkv.page import page
from hkv.testing.planting import Patch, applied
from tests.page.reading import data_of, drawn

RTP = ("rtp-llm/single", "full:1", "reference.dialects.rtp_llm.lists:sweep")
SGLANG = ("sglang-0.5.23", "full:1,swa:1:1", "reference.language.mechanisms:FreeList.reserve")
SPACE = ("--num-blocks", "3", "--requests", "1", "--max-model-len", "1")


def explored(where: tuple[str, str, str], old: str, new: str, folder: pathlib.Path) -> Any:
    """The page's case of what an edit of the reference breaks."""
    arguments = ("--dialect", where[0], "--groups", where[1], "--save", f"{folder}/found.jsonl")
    with applied(Patch(where[2], old, new)):
        done = CliRunner().invoke(cli, ["explore", *arguments, *SPACE, "--html", f"{folder}/page.html"])
    assert done.exit_code == 1, done.output
    (case,) = data_of((folder / "page.html").read_bytes())["cases"]
    return case


@pytest.mark.parametrize(
    ("where", "old", "new", "invariant", "status"),
    [
        (RTP, "block if goes else 0", "block if goes and at > 0 else 0", "rtp references", HELD),
        (SGLANG, "self.count += count", "self.count += count - 1", "pages are somewhere", 0),
    ],
)
def test_the_state_that_breaks_an_invariant_is_drawn(
    where: Any, old: str, new: str, invariant: str, status: int, tmp_path: pathlib.Path
) -> None:
    """The first block is still held, or lost, where the right cache has it free."""
    case = explored(where, old, new, tmp_path)
    assert case["headline"] == f"broken: {invariant}"
    assert case["marks"][0]["title"] == f"numpy breaks: {invariant}"
    assert drawn(case)["numpy"][0][0] == status
    log = read_log(str(tmp_path / "found.jsonl"))
    right = history("", log.header, log.operations, (("numpy", engine_factory("numpy")),), explained=False)
    assert drawn(data_of(page("", right)))["numpy"][0][0] == FREE


def test_an_operation_that_is_not_performed_is_said(tmp_path: pathlib.Path) -> None:
    case = explored(RTP, "block = ids.blocks[at]", "block = ids.blocks[at + 99]", tmp_path)
    (side,), (mark,) = case["sides"], case["marks"]
    assert (case["headline"], mark["title"]) == ("broken: totality", "numpy breaks: totality")
    assert side["answers"].splitlines()[-1].startswith("fails: IndexError: list index out of range")
    assert "IndexError: list index out of range" in mark["text"][0]
    assert [type(each).__name__ for each in read_log(str(tmp_path / "found.jsonl")).operations][2:] == ["StateOp"]
    assert drawn(case)["numpy"] == {0: (HELD, 1, -1, [("r1", 0, 0)], "")}

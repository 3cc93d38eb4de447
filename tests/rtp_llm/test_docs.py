"""The logs in docs/dialects.md say what the rules say, and each pair of them shows a difference."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import parse_log

TEXT = (pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "dialects.md").read_text()
SECTIONS = {
    section.splitlines()[0]: re.findall(r"```jsonl\n(.*?)```", section, re.DOTALL)
    for section in TEXT.split("\n## ")[1:]
}


@pytest.mark.parametrize("title", SECTIONS)
def test_both_logs_agree_with_the_reference(title: str) -> None:
    logs = SECTIONS[title]
    assert len(logs) == 2
    for log, dialect, parse in zip(logs, ("vllm-0.33", "rtp-llm/"), (parse_log, parse_log), strict=True):
        lines = log.splitlines()
        assert json.loads(lines[0])["dialect"].startswith(dialect)
        assert 2 <= len(lines) - 1 <= 6
        assert check_log(parse(log.encode(), title), engine_factory("numpy")) is None


def test_what_the_text_says_of_the_logs() -> None:
    def last(title: str) -> list[dict]:
        return [json.loads(log.splitlines()[-1])["want"] for log in SECTIONS[title]]

    vllm, rtp = last("Which block comes next")
    assert (vllm["blocks"], rtp["lists"]) == ([[3, 4]], [[[1, 2]]])
    vllm, rtp = last("Whether a cached block is free")
    assert (vllm["free"], rtp["pools"][0]["free"]) == ([3, 4, 2, 1], [3, 4])
    vllm, rtp = last("When a prefix can be hit")
    assert (vllm["hit"], rtp["reused"]) == (8, 0)
    vllm, rtp = last("What is evicted first")
    assert vllm["cached"]["1"][1] == 4
    assert [blocks for _, blocks in rtp["cached"]] == [[2]]
    vllm, rtp = last("Two blocks with the same content")
    assert (len(vllm["cached"]), [blocks for _, blocks in rtp["cached"]]) == (2, [[1, 2]])
    vllm, rtp = last("What a recurrent group keeps, and how a hole is written")
    assert (vllm["rows"]["a"][1], rtp["lists"]["a"][0][1]) == ([0, 0, 0, 5], [-1, 5, -1, 6])
    vllm, rtp = last("How a refusal is worded")
    assert (vllm["blocks"], rtp["verdict"]) == (None, "permanent")
    vllm, rtp = last("How a second sequence of one prompt comes about")
    assert (vllm["blocks"], rtp["copies"]) == ([[4]], [["default", 3, 4]])


def test_the_description_on_the_page_about_memory_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "rtp-llm.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert f"# {capsys.readouterr().out.strip()}" in code

"""Logs under RTP-LLM's rules: written, read, checked, refused, described by the schema, and shown in a page."""

from __future__ import annotations

import json
import pathlib
import random
import re
from typing import Any

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from hkv.cli.check import command
from hkv.contract.log import Log
from hkv.contract.traffic import RandomChoices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import to_rtp_config, to_rtp_header
from hkv.errors import FileError
from hkv.oracle import log_schema
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import parse_log, read_log, write_log
from tests.rtp_llm.traffic import draw_config
from tests.suites.rtp import TOPICS, begin

NUMPY = engine_factory("numpy")
SCHEMA = json.loads(log_schema.PATH.read_text())

HEADER: dict[str, Any] = {
    "oplog": 2,
    "dialect": "rtp-llm/hybrid",
    "feature": "fork",
    "num_blocks": [10],
    "groups": [
        {"tag": "linear", "type": "LINEAR", "block_size": 4},
        {"tag": "full1", "type": "FULL", "block_size": 4, "kernel_block_size": 2},
    ],
    "block_size": 4,
    "linear_step": 2,
}
LINES: list[dict[str, Any]] = [
    {"op": "request", "id": "a", "tokens": [1, 2, 3, 4, 5, -6]},
    {"op": "malloc", "id": "a", "want": {"verdict": "granted", "reused": 0, "lists": [[[-1, 1], [2, 3]]]}},
    {
        "op": "fork",
        "id": "a",
        "sources": [0, 0],
        "want": {"copies": [["linear", 1, 4], ["full1", 3, 5]], "lists": [[[-1, 4], [2, 5]], [[-1, 1], [2, 3]]]},
    },
    {"op": "append", "id": "a", "tokens": [[7, 8, 9], [7, 8, 10]]},
    {
        "op": "malloc",
        "id": "a",
        "want": {"verdict": "granted", "reused": 0, "lists": [[[-1, 4, 6], [2, 5, 7]], [[-1, 1, 8], [2, 3, 9]]]},
    },
    {"op": "evict", "least": 1, "want": {"count": 0}},
]
"""Written by hand: the last use of a sequence keeps its blocks, the earlier one gets the smallest free ids."""


def encoded(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def changed(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**line, **changes}.items() if value is not ...}


def test_a_log_written_by_hand_agrees() -> None:
    assert check_log(parse_log(encoded([HEADER, *LINES]), "hand"), NUMPY) is None


def test_a_wrong_answer_is_found_and_placed() -> None:
    wrong = json.loads(json.dumps(LINES))
    wrong[2]["want"]["lists"] = wrong[2]["want"]["lists"][::-1]
    difference = check_log(parse_log(encoded([HEADER, *wrong]), "hand"), NUMPY)
    assert difference is not None
    assert (difference.line, difference.operation, difference.field) == (4, "fork", "lists[0][0]")
    assert "fork id=a sources=[0,0]" in difference.describe()


@pytest.mark.parametrize("seed", range(2 * len(TOPICS)))
def test_random_logs_come_back_as_they_were(seed: int, tmp_path: pathlib.Path) -> None:
    header, play = begin(RandomChoices(seed), TOPICS[seed % len(TOPICS)])
    engine, operations, answers = RtpNumpyEngine(header), [], []

    def perform(operation: structs.RtpOp) -> Any:
        operations.append(operation)
        answers.append(engine.perform(operation))
        return answers[-1]

    play(perform)
    path = tmp_path / "random.jsonl"
    write_log(path, header, operations, answers)
    log = read_log(path)
    assert isinstance(log, Log)
    assert (log.header, len(log.operations)) == (header, len(operations))
    assert check_log(log, NUMPY) is None
    for number, line in enumerate(path.read_bytes().splitlines()):
        definition = "rtp_operation" if number else "rtp_header"
        validator(definition).validate(json.loads(line))


def test_the_command_checks_them(tmp_path: pathlib.Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(encoded([HEADER, *LINES]))
    result = CliRunner().invoke(command, [str(good), "--coverage"])
    assert (result.exit_code, "1 of 1 logs agree" in result.output) == (0, True), result.output
    counted = {words[1]: words[5] for line in result.output.splitlines() if len(words := line.split()) > 5}
    assert (counted["copy-last"], counted["grown"], counted["retryable"]) == ("2", "1", "0")
    assert "cached-window" not in counted
    bad.write_bytes(encoded([HEADER, *LINES[:5], changed(LINES[5], want={"count": 3})]))
    result = CliRunner().invoke(command, [str(bad)])
    assert result.exit_code == 1
    assert "evict: count" in result.output
    other = CliRunner().invoke(command, [str(good), "--engine", "hkv.dialects.vllm.engines.numpy:NumpyEngine"])
    assert isinstance(other.exception, FileError)
    assert "expected vllm-0.33" in str(other.exception)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"oplog": 1}, "version 2"),
        ({"dialect": "rtp-llm/single"}, "rtp-llm/hybrid, for 2 groups"),
        ({"num_blocks": [10, 10]}, "one number a pool"),
        ({"num_blocks": [-1]}, "from 0 to"),
        ({"linear_step": 2**31}, "from 0 to"),
        ({"feature": ""}, "in a word"),
        ({"unknown": 1}, "no such field"),
        ({"block_size": ...}, "to be given"),
        ({"bugs": ["no-such-bug"]}, "names of"),
        ({"groups": [{"tag": "a", "type": "MAMBA", "block_size": 4}]}, "one of LINEAR, FULL, SWA"),
        ({"groups": [{"tag": "a", "type": "FULL", "block_size": 4, "evict_policy": "ALL"}]}, "one of CHAIN"),
        ({"groups": []}, "at least one group"),
    ],
)
def test_bad_headers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        parse_log(encoded([changed(HEADER, **changes)]), "bad")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"op": "step"}, "one of request"),
        ({"op": "malloc", "id": "a"}, "what the recorded engine answered"),
        ({"op": "malloc", "id": "b", "want": {"verdict": "granted", "reused": 0, "lists": []}}, "that arrived"),
        ({"op": "request", "id": "a", "tokens": [1]}, "a name that no request has"),
        ({"op": "request", "id": "b", "tokens": []}, "at least one token"),
        ({"op": "request", "id": "b", "tokens": [2**31]}, "from -2147483648"),
        ({"op": "request", "id": "b", "tokens": [1], "sequences": 0}, "at least 1"),
        ({"op": "append", "id": "a", "tokens": [[1], [2]]}, "each of 1 sequences"),
        ({"op": "insert", "id": "w"}, "a request with blocks"),
        ({"op": "drop", "id": "a"}, "a request without blocks"),
        ({"op": "fork", "id": "a", "sources": [1], "want": {"copies": [], "lists": []}}, "a sequence from 0 to 0"),
        ({"op": "release", "name": "x"}, "something is kept"),
        ({"op": "settle", "name": "x"}, "something is kept"),
        ({"op": "hold", "name": "x", "id": "a", "sequence": 1, "want": {"keys": None, "blocks": None}}, "0 to 0"),
        ({"op": "evict", "least": -1, "want": {"count": 0}}, "from 0 to"),
    ],
)
def test_bad_lines(line: dict[str, Any], message: str) -> None:
    lines = [HEADER, *LINES[:2], {"op": "request", "id": "w", "tokens": [1]}, line]
    with pytest.raises(FileError, match=message) as caught:
        parse_log(encoded(lines), "bad")
    assert caught.value.line == 5


def test_headers_and_configurations_are_two_forms_of_one() -> None:
    for seed in range(30):
        config: RtpConfig = draw_config(random.Random(seed))
        header = to_rtp_header(config, "x")
        assert to_rtp_header(to_rtp_config(header), "x") == header
        assert to_rtp_config(header).policies == config.policies


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


# The logs in docs/dialects/, by the section of docs/dialects.md that is about them.


DOCS = pathlib.Path(__file__).resolve().parent.parent.parent / "docs"
SECTIONS = {
    section.splitlines()[0]: [(DOCS / path).read_text() for path in found]
    for section in (DOCS / "dialects.md").read_text().split("\n### ")[1:]
    if (found := re.findall(r"\((dialects/[\w-]+\.jsonl)\)", section))
}


@pytest.mark.parametrize("title", SECTIONS)
def test_both_logs_agree_with_the_reference(title: str) -> None:
    assert len(list((DOCS / "dialects").iterdir())) == 2 * len(SECTIONS)
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
    page = (DOCS / "dialects.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert f"# {capsys.readouterr().out.strip()}" in code

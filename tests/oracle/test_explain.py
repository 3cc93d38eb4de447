"""Explanations tell what the operations and the definition of a hit say."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner

from hkv.cli.explain import command
from hkv.contract.log import Log
from hkv.dialects.vllm.explain.explain import explain
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import LookupOp
from hkv.errors import ConfigError, FileError
from hkv.oracle.log_file import parse_log, read_log
from tests.oracle.sample import ALLOCATE, HEADER, encode

LINES = [
    {"op": "step"},
    {"op": "request", "id": "r1", "tokens": [5, 6, 7]},
    ALLOCATE,
    {"op": "advance", "id": "r1", "tokens": 3},
    {"op": "free", "id": "r1"},
    {"op": "request", "id": "r2", "tokens": [5, 6, 9]},
    {"op": "lookup", "id": "r2", "want": {"hit": 2, "blocks": [[1]], "shared_prefix": 0}},
    {"op": "evict", "blocks": [1]},
    {"op": "lookup", "id": "r2", "want": {"hit": 0, "blocks": [[]], "shared_prefix": 0}},
    {"op": "drop", "id": "r2"},
]


def log(*changed: dict, header: dict | None = None) -> Log:
    return parse_log(encode([{**HEADER, **(header or {})}, *LINES, *changed]), "a.jsonl")


def test_a_hit() -> None:
    found = explain(log(), 8)
    assert (found.request, found.hit, found.found, found.alignment, found.departed) == ("r2", 2, 2, 2, None)
    assert found.situation == "waiting, 3 tokens, 3 of them prompt"
    assert found.events == ((7, "request 3 tokens"), (8, "lookup: hit 2, blocks [[1]]"))
    (group,) = found.groups
    assert (group.largest, group.next, group.lacks) == (2, None, ())


def test_a_line_without_a_request_is_told_of_the_last_one() -> None:
    assert explain(log(), 9).request == "r2"
    with_events = log({"op": "events", "want": []}, header={"oplog": 1})
    found = explain(with_events, 12, "r1")
    assert found.answer.startswith(": stored 1 blocks of group 0, 2 tokens")
    assert "; removed from group 0" in found.answer
    assert found.differs == "number of stored events: the log has 0, the reference 1"
    assert explain(with_events, 12, "r1").departed == 12


def test_a_line_before_any_request_is_told_alone(tmp_path: pathlib.Path) -> None:
    """A log that differs there was refused, with nothing said about the difference."""
    stored = {"type": "stored", "group": 0, "num_blocks": 1, "block_size": 2, "tokens": [1, 2]}
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode([{**HEADER, "oplog": 1}, {"op": "step"}, {"op": "events", "want": [stored]}]))
    found = explain(read_log(path), 3)
    assert (found.request, found.events, found.groups, found.departed) == ("", (), (), 3)
    assert found.differs == "number of stored events: the log has 1, the reference 0"
    said = CliRunner().invoke(command, [str(path), "--line", "3"])
    assert said.exit_code == 0
    assert said.output.splitlines() == [
        "line 3: events",
        "  the reference: nothing",
        "  number of stored events: the log has 1, the reference 0",
        "  the log's own answers are others from this line on; what follows is the reference's account",
        "  no request is there up to this line",
    ]
    assert explain(log(), 2).request == ""


def test_a_refusal_says_why() -> None:
    """Block 0 aside there are few blocks: some are asked to be left, or the whole request is asked about."""
    asked = {**ALLOCATE, "id": "r3", "must_fit": False, "want": {"blocks": None}}
    more = [{"op": "request", "id": "r3", "tokens": list(range(40))}, {**asked, "new": 30}, {**asked, "reserved": 99}]
    blocks = HEADER["num_blocks"] - 1
    for line, change, why in (
        (13, {}, f"it needs 15 blocks: {blocks} free"),
        (14, {"reserved": 99}, f"it needs 2 blocks: {blocks} free, 99 to be left"),
        (14, {"must_fit": True}, f"the whole request needs 20 blocks: {blocks} free"),
        (14, {"new": 1, "reserved": blocks}, f"it needs 1 block: {blocks} free, {blocks} to be left"),
    ):
        answer = explain(log(*more[:2], {**asked, **change}), line).answer
        assert answer == f": refused, {why}"


def test_a_refusal_of_a_hit_that_is_not_written() -> None:
    path = pathlib.Path(__file__).parents[2] / "docs" / "upstream-bugs" / "copied-before-written.jsonl"
    answer = explain(read_log(path), 9).answer
    assert answer == ": refused, until the next step: the hit ends in what this step has yet to write, in group 0"


def test_what_was_lost_and_where() -> None:
    found = explain(log(), 10)
    (group,) = found.groups
    assert (found.hit, group.largest, group.next) == (0, 0, 2)
    (lack,) = group.lacks
    assert (lack.first, lack.last, lack.block) == (0, 1, 1)
    assert lack.why == "lost on line 9, from block 1 (evict)"
    assert found.blocks == {
        1: (
            (4, "handed out to r1, group 0, column 0"),
            (4, "cached as the first 2 tokens of r1, group 0"),
            (6, "given back by r1, free, cached"),
            (9, "lost its key, of 2 tokens in group 0"),
        )
    }


def test_another_request_and_running_ones() -> None:
    found = explain(log(), 5, "r1")
    assert found.situation == "running, 0 computed, 3 tokens, 3 of them prompt"
    assert set(found.blocks) == {1, 2}
    assert explain(log(), 3).situation == "waiting, 3 tokens, 3 of them prompt"
    assert explain(log(), 11).request == "r2"


def test_a_log_that_departs() -> None:
    lines = [*LINES[:6], {**LINES[6], "want": {"hit": 0, "blocks": [[]], "shared_prefix": 0}}]
    departing = parse_log(encode([HEADER, *lines]), "a.jsonl")
    assert explain(departing, 8).departed == 8
    assert explain(departing, 7).departed is None


@pytest.mark.parametrize(
    ("line", "request_id", "error"),
    [
        (1, None, FileError),
        (13, None, FileError),
        (4, "r2", ConfigError),
    ],
)
def test_lines_without_a_story(line: int, request_id: str | None, error: type) -> None:
    with pytest.raises(error):
        explain(log(), line, request_id)


def test_recorded_logs_are_explained_by_the_definition(data_dir: pathlib.Path) -> None:
    explained = longer = 0
    for path in sorted((data_dir / "oplogs").rglob("*.jsonl"))[::7]:
        recorded = read_log(path)
        lookups = [index + 2 for index, operation in enumerate(recorded.operations) if isinstance(operation, LookupOp)]
        for line in lookups[-2:]:
            found = explain(recorded, line)
            assert found.departed is None
            config = to_config(recorded.header)
            operation = recorded.operations[line - 2]
            assert isinstance(operation, LookupOp)
            if not found.causes:
                assert found.hit == found.found
            assert found.hit <= min((group.largest for group in found.groups), default=0)
            if all(group.next is not None for group in found.groups) and found.groups:
                assert any(group.lacks for group in found.groups)
                longer += 1
            explained += 1
            assert config.caching or found.hit == 0
    assert explained > 15
    assert longer > 3


def test_a_hit_of_full_attention_alone_names_what_a_load_has_to_bring(data_dir: pathlib.Path) -> None:
    path = data_dir / "oplogs" / "external-connector-0.jsonl"
    found = explain(read_log(path), 67)
    assert (found.hit, found.found, found.causes) == (24, 24, ())
    assert found.lagging == (2, 3)  # groups of equal spec are looked up together
    assert [(group.largest, group.next, bool(group.lacks)) for group in found.groups] == [
        (24, 24, False),
        (24, 24, False),
        (18, 24, True),
        (24, 24, False),
    ]
    assert found.groups[2].lacks[0].why == "lost on line 33, from block 9 (allocate r3)"
    done = CliRunner().invoke(command, [str(path), "--line", "67"])
    assert "a load has to bring the end of groups 2, 3 (" in done.output
    assert "differs from the definition" not in done.output


def test_command(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode([HEADER, *LINES]))
    done = CliRunner().invoke(command, [str(path), "--line", "10"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("line 10: lookup id=r2\n  the reference: hit 0")
    assert "longest hit by definition: 0 tokens" in done.output
    assert "lost on line 9, from block 1 (evict)" in done.output
    done = CliRunner().invoke(command, [str(path), "--line", "8", "--json", "-"])
    assert json.loads(done.stdout)["hit"] == 2

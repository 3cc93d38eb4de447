"""Reading and writing logs: what is wrong is said with file, line, field and value."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import FORMAT
from hkv.errors import FileError
from hkv.oracle.log_file import find_logs, parse_log, read_log, write_log
from tests.oracle.sample import ALLOCATE, HEADER, OPERATIONS, encode, sample


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


HEADERS = [
    ({"oplog": 5}, "oplog", 5, "versions"),
    ({"oplog": True}, "oplog", True, "versions"),
    ({"dialect": "vllm-0.9"}, "dialect", "vllm-0.9", "vllm-0.33"),
    ({"num_blocks": "8"}, "num_blocks", "8", "int"),
    ({"num_blocks": 0}, "num_blocks", 0, "from 1 to"),
    ({"num_blocks": 1 << 40}, "num_blocks", 1 << 40, "at most"),
    ({"feature": ""}, "feature", "", "word"),
    ({"groups": []}, "groups", [], "at least one"),
    ({"groups": [{"kind": "full", "block_size": 2}]}, "kind", "full", "one of"),
    ({"groups": [{"kind": 3, "block_size": 2}]}, "groups[0].kind", 3, "kind"),
    ({"groups": [{"kind": "full_attention", "block_size": -2}]}, "groups[0].block_size", -2, "integer"),
    ({"groups": [{"kind": "sliding_window", "block_size": 2}]}, "window", None, "given"),
    ({"groups": [{**HEADER["groups"][0], "window": 3}]}, "window", 3, "a field of full_attention"),
    ({"groups": [{**HEADER["groups"][0], "cp_sharded": 1}]}, "groups[0].cp_sharded", 1, "true or false"),
    ({"groups": [{"kind": "mla", "block_size": 2}]}, "kind", "mla", "version 2"),
    ({"watermark": 0.5}, "watermark", 0.5, "version 2"),
    ({"bugs": ["window-one-never-hits"]}, "bugs", ["window-one-never-hits"], "version 2"),
    ({"oplog": 2, "bugs": ["nonsense"]}, "bugs", "nonsense", "names"),
    ({"hash": "md5"}, "hash", "md5", "sha256"),
    ({"scheduler_block_size": 3}, "scheduler_block_size", 3, "multiple"),
    ({"colour": 1}, "colour", 1, "no such field"),
]


@pytest.mark.parametrize(("changes", "field", "value", "expected"), HEADERS)
def test_bad_header(changes: dict[str, Any], field: str, value: object, expected: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_log(sample(**changes), "a.jsonl")
    error = caught.value
    assert (error.path, error.line, error.field, error.value) == ("a.jsonl", 1, field, value)
    assert expected in error.expected


def test_header_key_missing() -> None:
    with pytest.raises(FileError, match=r"a:1: num_blocks = None: expected to be given"):
        parse_log(encode([without(HEADER, "num_blocks"), *OPERATIONS]), "a")
    with pytest.raises(FileError, match=r"a:1: oplog"):
        parse_log(encode([without(HEADER, "oplog")]), "a")


LIVE_LINES = [
    ({"op": "computed", "id": "r1", "tokens": 9}, "op", "computed"),
    ({"op": "retire", "id": "r1", "tokens": 0}, "op", "retire"),
    ({"op": "pop", "id": "r1"}, "op", "pop"),
    ({"op": "release", "blocks": [1]}, "op", "release"),
    ({"op": "hold", "blocks": [1]}, "op", "hold"),
    ({"op": "digest", "want": {"digest": "0" * 64}}, "op", "digest"),
    ({"op": "zeros", "want": []}, "op", "zeros"),
    ({"op": "resume", "id": "r1", "keep": 0, "tokens": [1], "prompt": 1}, "op", "resume"),
    ({"op": "unwritten", "id": "r1", "tokens": 0}, "op", "unwritten"),
    ({"op": "offloads", "want": {}}, "op", "offloads"),
    ({"op": "finalize", "id": "r1", "want": []}, "op", "finalize"),
    ({"op": "end", "reason": "poked"}, "op", "end"),
    ({"op": "request", "id": "r1", "tokens": [1], "keys": ["00"]}, "keys", ["00"]),
    ({"op": "copies", "hold": True, "want": []}, "hold", True),
    ({"op": "request", "id": "r1", "tokens": [1], "session": "s"}, "session", "s"),
    ({"op": "request", "id": "r1", "tokens": [1], "report": "full"}, "report", "full"),
    (
        {"op": "events", "want": [{"type": "removed", "group": 0, "num_blocks": 1, "medium": "GPU"}]},
        "want[0].medium",
        "GPU",
    ),
]
"""Operations and fields of version 3, each with the field that an earlier version refuses."""

LINES = [
    ({"op": "jump"}, "op", "jump", "one of step, request"),
    ({"id": "r1"}, "op", None, "one of step, request"),
    ({"op": "step", "id": "r1"}, "id", "r1", "no such field"),
    ({"op": "request", "id": "r1"}, "tokens", None, "given"),
    ({"op": "request", "id": "r1", "tokens": []}, "tokens", [], "at least one"),
    ({"op": "request", "id": "r1", "tokens": [1, -1]}, "tokens", -1, "from 0"),
    ({"op": "request", "id": "r1", "tokens": [1, "2"]}, "tokens[1]", "2", "int"),
    ({"op": "request", "id": "r1", "tokens": [1] * 65}, "tokens", 65, "max_model_len"),
    ({"op": "request", "id": "r1", "tokens": [1], "extra": {"salt": "s"}}, "extra", {"salt": "s"}, "version 2"),
    ({"op": "lookup", "id": "r1"}, "want", None, "answered"),
    ({"op": "events", "want": [{"type": "lost"}]}, "want[0].type", "lost", "stored"),
    ({"op": "events", "want": [{"type": "cleared"}]}, "want[0].type", "cleared", "stored"),
    ({"op": "events", "want": [{"type": "removed", "keys": []}]}, "want[0].keys", [], "version 2"),
    ({"op": "state", "want": {"free": []}}, "want.refs", None, "given"),
    ({"op": "evict", "blocks": [8]}, "blocks", 8, "below 8"),
    ({"op": "lookup", "id": "r9", "want": OPERATIONS[2]["want"]}, "id", "r9", "arrived"),
    ({"op": "free", "id": "r9"}, "id", "r9", "arrived"),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("line", "field", "value"), LIVE_LINES)
def test_version_3_alone(line: dict[str, Any], field: str, value: object, version: int) -> None:
    with pytest.raises(FileError) as caught:
        parse_log(encode([{**HEADER, "oplog": version}, {"op": "step"}, line]), "a.jsonl")
    assert (caught.value.field, caught.value.value) == (field, value)
    assert "version 3" in caught.value.expected


def test_nothing_follows_the_end() -> None:
    lines = [{**HEADER, "oplog": 3}, {"op": "step"}, {"op": "end", "reason": "poked"}]
    assert parse_log(encode(lines), "a.jsonl").operations[-1] == oplog.EndOp(reason="poked")
    with pytest.raises(FileError, match="nothing after"):
        parse_log(encode([*lines, {"op": "step"}]), "a.jsonl")


def test_live_operations_are_legal_in_version_3() -> None:
    lines = [
        {**HEADER, "oplog": 3},
        {"op": "request", "id": "r1", "tokens": [-5, 2**31 - 1, -(2**31)]},
        {"op": "computed", "id": "r1", "tokens": 9},
        {"op": "computed", "id": "r1", "tokens": 0},
        {"op": "retire", "id": "r1", "tokens": 0},
        {"op": "copies", "hold": True, "want": []},
    ]
    assert len(parse_log(encode(lines), "a.jsonl").operations) == 5


@pytest.mark.parametrize(("line", "field", "value", "expected"), LINES)
def test_bad_line(line: dict[str, Any], field: str, value: object, expected: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_log(encode([HEADER, {"op": "step"}, line]), "a.jsonl")
    error = caught.value
    assert (error.path, error.line, error.field, error.value) == ("a.jsonl", 3, field, value)
    assert expected in error.expected


SEQUENCES = [
    ([OPERATIONS[1]], "id", "r1"),
    ([{**ALLOCATE, "hit": 2}], "hit", 2),
    ([{**ALLOCATE, "new": 0}], "new", 0),
    ([{**ALLOCATE, "external": 9}], "external", 9),
    ([{**ALLOCATE, "new": 65}], "new", 65),
    ([{**ALLOCATE, "in_flight": 1}], "in_flight", 1),
    ([{"op": "advance", "id": "r1", "tokens": 1}], "id", "r1"),
    ([{"op": "free", "id": "r1"}], "id", "r1"),
    ([ALLOCATE, {"op": "advance", "id": "r1", "tokens": 4}], "tokens", 4),
    ([ALLOCATE, {"op": "commit", "id": "r1", "tokens": 1}], "tokens", 1),
    ([ALLOCATE, {"op": "drop", "id": "r1"}], "id", "r1"),
    ([ALLOCATE, OPERATIONS[2]], "id", "r1"),
    ([ALLOCATE, {**ALLOCATE, "external": 1}], "external", 1),
    ([{"op": "drop", "id": "r1"}, OPERATIONS[2]], "id", "r1"),
]


@pytest.mark.parametrize(("lines", "field", "value"), SEQUENCES)
def test_operation_out_of_order(lines: list[dict[str, Any]], field: str, value: object) -> None:
    with pytest.raises(FileError) as caught:
        parse_log(encode([HEADER, OPERATIONS[1], *lines]), "a")
    error = caught.value
    assert (error.line, error.field, error.value) == (2 + len(lines), field, value)


EXTRAS = [
    ({"lora": ["a"]}, "extra.lora"),
    ({"multimodal": [["a", 0, 0]]}, "extra.multimodal"),
    ({"multimodal": [["a", 1, 3]]}, "extra.multimodal"),
    ({"multimodal": [["a", 0, 2], ["b", 1, 1]]}, "extra.multimodal"),
    ({"embeds": ["00"]}, "extra.embeds"),
    ({"embeds": ["00", "0", "00"]}, "extra.embeds"),
    ({"embeds": ["00", "0000", "00"]}, "extra.embeds"),
    ({"embeds": ["0g", "00", "00"]}, "extra.embeds"),
]


@pytest.mark.parametrize(("extra", "field"), EXTRAS)
def test_bad_extra_keys(extra: dict[str, Any], field: str) -> None:
    request = {"op": "request", "id": "r1", "tokens": [1, 2, 3], "extra": extra}
    with pytest.raises(FileError) as caught:
        parse_log(encode([{**HEADER, "oplog": 2}, request]), "a")
    assert (caught.value.line, caught.value.field) == (2, field)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{", b"[]\n", b"\xff\xfe", b"null\n", b"[" * 100_000, b'{"oplog": 1e999}']
)
def test_no_log_at_all(data: bytes) -> None:
    with pytest.raises(FileError):
        parse_log(data, "a")


def test_empty_line_is_named() -> None:
    with pytest.raises(FileError, match="a:3"):
        parse_log(encode([HEADER, {"op": "step"}]) + b"\n" + encode([{"op": "step"}]), "a")


def test_what_is_written_is_read_again(tmp_path: pathlib.Path) -> None:
    log = parse_log(sample(), "a")
    answers = [getattr(operation, "want", None) for operation in log.operations]
    path = tmp_path / "deep" / "b.jsonl"
    write_log(path, log.header, log.operations, answers)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [HEADER, *OPERATIONS]
    assert read_log(path).operations == log.operations
    assert [entry.name for entry in path.parent.iterdir()] == ["b.jsonl"]


def test_events_spell_out_what_is_zero() -> None:
    stored = oplog.CacheEvent(type="stored", group=0, num_blocks=0, block_size=2, tokens=[])
    assert FORMAT.encode_answer([stored]) == [
        {"type": "stored", "group": 0, "num_blocks": 0, "block_size": 2, "tokens": []}
    ]
    assert FORMAT.encode_answer([oplog.CacheEvent(type="cleared")]) == [{"type": "cleared"}]


def test_unwritable_place_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    log = parse_log(sample(), "a")
    with pytest.raises(FileError, match="file"):
        write_log(tmp_path / "file" / "b.jsonl", log.header, [], [])


def test_find_logs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/2.jsonl", "a/1.jsonl", "a/notes.txt", "3.log"):
        (tmp_path / name).write_text("")
    assert find_logs([tmp_path / "a", tmp_path / "3.log"]) == [
        str(tmp_path / name) for name in ("a/1.jsonl", "a/2.jsonl", "3.log")
    ]
    with pytest.raises(FileError, match="no such file"):
        find_logs([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="without logs"):
        find_logs([tmp_path / "empty"])
    with pytest.raises(FileError, match=r"empty.*a readable file"):
        read_log(tmp_path / "empty")

"""Checking a log: the first line that differs is the one reported, with what led to it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import msgspec
import pytest
from click.testing import CliRunner

from hkv.cli.check import command
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Answer, CacheState, Header, Operation, StateOp
from hkv.errors import ConfigError, FileError
from hkv.oracle.check import HISTORY, FollowedLog, check_log, follow
from hkv.oracle.log_file import log_bytes, parse_log, read_log
from hkv.oracle.record import differ, record
from tests.oracle.sample import ALLOCATE, HEADER, OPERATIONS, encode, sample


class Batched(NumpyEngine):
    """The reference, taking everything at once."""

    def run(self, operations: Sequence[Operation]) -> list[Answer]:
        return [apply(self, operation) for operation in operations]


@pytest.mark.parametrize("factory", [NumpyEngine, Batched])
def test_agreement(factory: type[NumpyEngine]) -> None:
    assert check_log(parse_log(sample(), "a"), factory) is None


@pytest.mark.parametrize("factory", [NumpyEngine, Batched])
def test_first_difference(factory: type[NumpyEngine]) -> None:
    spoiled = [*OPERATIONS[:3], {**ALLOCATE, "want": {"blocks": [[1, 3]]}}, *OPERATIONS[4:]]
    spoiled[-1] = {"op": "state", "want": {"free": [], "refs": {}, "rows": {}, "cached": {}}}
    difference = check_log(parse_log(encode([HEADER, *spoiled]), "a.jsonl"), factory)
    assert difference is not None
    assert (difference.path, difference.line, difference.operation, difference.id) == ("a.jsonl", 5, "allocate", "r1")
    assert (difference.field, difference.want, difference.got) == ("blocks[0]", [1, 3], [1, 2])
    assert [line for line, _ in difference.history] == [3, 4, 5]
    report = difference.describe()
    for part in ("a.jsonl:5: allocate r1: blocks[0]", "log    [1, 3]", "engine [1, 2]", "request id=r1 tokens=[5,6,7]"):
        assert part in report


def test_history_keeps_to_the_request() -> None:
    others = [{"op": "request", "id": f"x{i}", "tokens": [1]} for i in range(9)]
    spoiled = [*OPERATIONS[:3], *others, OPERATIONS[2], {**ALLOCATE, "want": {"blocks": None}}]
    difference = check_log(parse_log(encode([HEADER, *spoiled]), "a"), NumpyEngine)
    assert difference is not None
    assert all("x" not in text.split()[1] for _, text in difference.history)
    assert len(difference.history) <= HISTORY


def test_engine_that_cannot_represent_the_header() -> None:
    def refuse(header: Header) -> NumpyEngine:
        raise ConfigError("num_blocks", header.num_blocks, "fewer")

    with pytest.raises(FileError, match=r"a:1: num_blocks = 8: expected fewer"):
        check_log(parse_log(sample(), "a"), refuse)


class Raising(NumpyEngine):
    """Fails at the first state."""

    def state(self):  # type: ignore[no-untyped-def]
        raise ConfigError("state", 1, "nothing")


def test_error_of_an_engine_is_a_difference() -> None:
    log = parse_log(sample(), "a")
    difference = check_log(log, Raising)
    assert difference is not None
    assert isinstance(log.operations[difference.line - 2], StateOp)
    assert (difference.field, difference.want) == ("error", "no error")


def test_a_bug_makes_a_difference() -> None:
    groups = [{"kind": "sliding_window", "block_size": 2, "window": 1}]
    lines = [
        {"op": "request", "id": "a", "tokens": [1, 2, 3, 4, 5]},
        {"op": "lookup", "id": "a", "want": {"hit": 0, "blocks": [[]], "shared_prefix": 0}},
    ]
    log = parse_log(encode([{**HEADER, "groups": groups}, *lines]), "a")
    assert check_log(log, NumpyEngine, ["window-one-never-hits"]) is None
    difference = check_log(log, NumpyEngine)
    assert difference is not None
    assert (difference.field, difference.want, difference.got) == ("hit", 0, 4)


class Reusing(NumpyEngine):
    """The reference, which hands out the same object for every state."""

    told: CacheState | None = None

    def state(self) -> CacheState:
        now = super().state()
        self.told = self.told or now
        for name in now.__struct_fields__:
            setattr(self.told, name, getattr(now, name))
        return self.told


def test_an_answer_is_recorded_as_it_was_given() -> None:
    recording = record(Reusing, "core", 3, 2, 12)
    assert recording.answers == record(NumpyEngine, "core", 3, 2, 12).answers
    content = log_bytes(recording.header, recording.operations, recording.answers)
    assert check_log(parse_log(content, "a"), NumpyEngine) is None
    compared, parted = differ(NumpyEngine, Reusing, "core", 3, 2, 12)
    assert parted is None
    assert compared.answers == recording.answers


# Logs that grow are held against an engine line by line, whole lines alone, and agree or differ as `check` says.


@pytest.fixture(scope="module")
def content() -> bytes:
    recording = record(NumpyEngine, "core", 3, 2, 8)
    return log_bytes(recording.header, recording.operations, recording.answers)


def wrong(content: bytes) -> bytes:
    """The log with another answer to its last `allocate`."""
    lines = content.splitlines()
    place = max(number for number, line in enumerate(lines) if b'"op":"allocate"' in line)
    fields, groups = msgspec.json.decode(lines[place]), msgspec.json.decode(lines[0])["groups"]
    lines[place] = msgspec.json.encode({**fields, "want": {"blocks": [[999]] * len(groups)}})
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("step", [7, 1000])
def test_whole_lines_are_performed_as_they_come(content: bytes, step: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "live.jsonl"
    path.write_bytes(b"")
    log = FollowedLog(str(path), NumpyEngine)
    assert not log.advance()
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(content), step):
            file.write(content[start : start + step])
            log.advance()
            assert log.operations == max(0, content[: start + step].count(b"\n") - 1)
    assert log.difference is None


def test_it_differs_where_check_does(content: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "live.jsonl"
    path.write_bytes(wrong(content))
    expected = check_log(read_log(path), NumpyEngine)
    assert expected is not None
    (first, *_) = follow([str(tmp_path)], NumpyEngine, 0.02)
    assert first.difference == expected
    done = CliRunner().invoke(command, [str(tmp_path), "--follow", "0.02"])
    assert done.exit_code == 1
    assert done.output.startswith(expected.describe())
    assert done.output.splitlines()[-1].startswith("0 of 1 logs agree with engine numpy (")


def test_parts_follow_each_other(content: bytes, tmp_path: pathlib.Path) -> None:
    lines = content.splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:9]))
    (tmp_path / "a.part1.jsonl").write_bytes(b"".join(lines[9:]))
    (log,) = follow([str(tmp_path)], NumpyEngine, 0.02)
    assert (log.operations, log.difference) == (len(lines) - 1, None)


def test_what_cannot_be_followed_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileError, match="a compressed log"):
        FollowedLog("a.jsonl.gz", NumpyEngine)
    (tmp_path / "a.jsonl").write_text("none\n")
    with pytest.raises(FileError, match=r"a\.jsonl:1"):
        list(follow([str(tmp_path)], NumpyEngine, 0.02))
    (tmp_path / "empty").mkdir()
    assert list(follow([str(tmp_path / "empty")], NumpyEngine, 0.02)) == []

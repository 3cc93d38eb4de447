"""Logs that grow are held against an engine line by line, whole lines alone, and agree or differ as `check` says."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from click.testing import CliRunner

from hkv.cli.check import command
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import FileError
from hkv.oracle.check import FollowedLog, check_log, follow
from hkv.oracle.log_file import log_bytes, read_log
from hkv.oracle.record import record


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

"""Names that stand twice in an object of a log or of a trace: which value counts is nobody's guess."""

from __future__ import annotations

import json
import pathlib

import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import FileError
from hkv.files import decode_json
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.record import record
from hkv.replay.traces.reader import read_trace


def test_a_log_is_refused_by_name_and_line() -> None:
    recording = record(NumpyEngine, "core", 0, 2, 4)
    header, *lines = log_bytes(recording.header, recording.operations, recording.answers).splitlines()
    place = next(index for index, line in enumerate(lines) if b'"op":"allocate"' in line)
    for old, new, name, line in (
        (b'"new":', b'"new":1,"new":', "new", place + 2),
        (b'"blocks":', b'"blocks":[[]],"blocks":', "blocks", place + 2),
    ):
        damaged = [*lines[:place], lines[place].replace(old, new, 1), *lines[place + 1 :]]
        with pytest.raises(FileError, match=f"a.jsonl:{line}: {name} = '2 values'"):
            parse_log(b"\n".join([header, *damaged]), "a.jsonl")
    with pytest.raises(FileError, match=r"a\.jsonl:1: num_blocks = '2 values'"):
        parse_log(header.replace(b'"num_blocks":', b'"num_blocks":7,"num_blocks":', 1), "a.jsonl")
    assert parse_log(b"\n".join([header, *lines]), "a.jsonl").operations


def test_a_trace_is_refused_by_name_and_line(tmp_path: pathlib.Path) -> None:
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    text = json.dumps(line)
    (tmp_path / "t.jsonl").write_text(f'{text}\n{text[:-1]}, "hash_ids": [2]}}\n')
    with pytest.raises(FileError, match=r"t\.jsonl:2: hash_ids = '2 values'"):
        list(read_trace(tmp_path / "t.jsonl"))


def test_colons_in_texts_are_no_names() -> None:
    text = b'{"a": "b: c: d", "e": [{"f": ":"}, {"f": ""}]}'
    assert decode_json(text, "a.json", 1, "JSON") == json.loads(text)
    with pytest.raises(FileError, match="f = '2 values'"):
        decode_json(b'{"a": "b: c", "e": [{"f": 1, "f": 1}]}', "a.json", 1, "JSON")

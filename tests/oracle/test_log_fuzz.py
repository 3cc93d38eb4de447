"""Whatever is done to a log's bytes, lines or values, reading and checking it gives a FileError or a result."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hkv.contract.log import Log
from hkv.contract.registry import dialect_of
from hkv.errors import FileError
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import encode as encode_operation
from hkv.oracle.log_file import parse_log
from hkv.oracle.record import record
from tests.oracle.sample import HEADER, OPERATIONS, encode, sample

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.sampled_from([2**31, 2**63, 2**64, -(2**70), 1.5, "", "r1", "mamba", "opaque", "allocate", "removed"])
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["op", "id", "kind"]), inner, max_size=2)
    ),
    max_leaves=4,
)
VLLM = dialect_of("vllm-0.33")

FIELDS = sorted({*HEADER, *(name for line in OPERATIONS for name in line), "extra", "watermark", "bugs", "new name"})


def accept(data: bytes) -> Log | None:
    """The log, or None for a FileError; anything else fails the test."""
    try:
        return parse_log(data, "fuzzed")
    except FileError as error:
        message = str(error)
    assert message.startswith("fuzzed")
    assert "\n" not in message
    return None


def check(data: bytes) -> None:
    log = accept(data)
    if log is None or log.header.num_blocks > 1000:
        return
    try:
        difference = check_log(log, engine_factory("numpy"))
    except FileError:
        return
    if difference is not None:
        assert difference.describe().startswith("fuzzed:")


@given(st.binary(max_size=200))
@example(b'{"oplog":1}\n')
def test_any_bytes(data: bytes) -> None:
    accept(data)


@given(st.data())
@settings(max_examples=200)
def test_mutated_bytes(data: st.DataObject) -> None:
    text = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check(bytes(text))


@given(st.data())
@settings(max_examples=200)
def test_mutated_lines(data: st.DataObject) -> None:
    lines: list[Any] = [HEADER, *OPERATIONS]
    for _ in range(data.draw(st.integers(1, 4))):
        at, other = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["drop", "repeat", "swap"])):
            case "drop" if len(lines) > 1:
                del lines[at]
            case "repeat":
                lines.insert(at, lines[other])
            case _:
                lines[at], lines[other] = lines[other], lines[at]
    check(encode(lines))


@given(st.data())
@settings(max_examples=300)
def test_mutated_fields(data: st.DataObject) -> None:
    lines: list[Any] = [dict(line) for line in [HEADER, *OPERATIONS]]
    lines[0]["oplog"] = data.draw(st.sampled_from([1, 2]))
    for _ in range(data.draw(st.integers(1, 3))):
        line = data.draw(st.sampled_from(lines))
        name = data.draw(st.sampled_from([*line, *line, data.draw(st.sampled_from(FIELDS))]))
        line[name] = data.draw(VALUES)
    check(encode(lines))


@given(st.data())
@settings(max_examples=60)
def test_mutated_recording(data: st.DataObject) -> None:
    recording = record(engine_factory("numpy"), "core", data.draw(st.integers(0, 20)), 2, 3)
    lines = [encode_operation(VLLM, *pair) for pair in zip(recording.operations, recording.answers, strict=True)]
    values = [json.loads(line) for line in lines]
    for _ in range(data.draw(st.integers(1, 3))):
        line = data.draw(st.sampled_from(values))
        line[data.draw(st.sampled_from(list(line)))] = data.draw(VALUES)
    check(encode([json.loads(msgspec.json.encode(recording.header)), *values]))


def test_sample_agrees() -> None:
    log = accept(sample())
    assert log is not None
    assert check_log(log, engine_factory("numpy")) is None

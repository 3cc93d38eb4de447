"""Traces that cannot be used are told by file, line, field and expectation; what can be used is read as it stands."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hkv.errors import FileError
from hkv.replay.traces.reader import read_trace

GOOD = {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [0, 1]}
TOKENS = {"timestamp": 0, "tokens": [1, 2, 3], "output_length": 2}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def without(line, *fields):
    return {name: value for name, value in line.items() if name not in fields}


def test_both_forms_are_read_and_other_fields_ignored(tmp_path):
    path = write(
        tmp_path, {**GOOD, "type": "chat"}, b"", TOKENS, {**without(TOKENS, "output_length"), "output_tokens": [7]}
    )
    first, second, third = read_trace(path, tokens_per_id=8)
    assert (first.line, first.input_length, first.output_length, first.hash_ids) == (1, 10, 2, [0, 1])
    assert (second.line, second.input_length, second.tokens, second.output_tokens) == (3, 3, [1, 2, 3], None)
    assert (third.output_length, third.output_tokens) == (1, [7])


def test_a_prompt_may_end_within_its_last_id_or_without_an_id_for_the_rest(tmp_path):
    path = write(tmp_path, GOOD, {**GOOD, "hash_ids": [0]})
    assert [request.hash_ids for request in read_trace(path, tokens_per_id=8)] == [[0, 1], [0]]


def test_limit_stops_reading(tmp_path):
    path = write(tmp_path, GOOD, GOOD, b"not json")
    assert len(list(read_trace(path, 8, limit=2))) == 2


BAD = [
    (b"not json", "", "a JSON object"),
    (b"\xff\xfe{}", "", "a JSON object"),
    (b"[" * 5000, "", "a JSON object"),
    (b"17", "", "a JSON object"),
    (b"null", "", "a JSON object"),
    (b'{"timestamp": 0', "", "a JSON object"),
    ({**GOOD, "timestamp": None}, "timestamp", "a number of milliseconds"),
    (without(GOOD, "timestamp"), "timestamp", "a number of milliseconds"),
    ({**GOOD, "timestamp": "0"}, "timestamp", "a number of milliseconds"),
    ({**GOOD, "timestamp": True}, "timestamp", "a number of milliseconds"),
    ({**GOOD, "timestamp": -1}, "timestamp", "a number of milliseconds"),
    ({**GOOD, "timestamp": 1e300}, "timestamp", "a number of milliseconds"),
    (without(GOOD, "input_length"), "input_length", "an integer from 1"),
    ({**GOOD, "input_length": 0}, "input_length", "an integer from 1"),
    ({**GOOD, "input_length": 10.0}, "input_length", "an integer from 1"),
    ({**GOOD, "input_length": 2**40}, "input_length", "an integer from 1"),
    (without(GOOD, "output_length"), "output_length", "an integer from 0"),
    ({**GOOD, "output_length": -1}, "output_length", "an integer from 0"),
    (without(GOOD, "hash_ids"), "hash_ids", "to be given, or else tokens"),
    ({**GOOD, "hash_ids": 3}, "hash_ids", "a list"),
    ({**GOOD, "hash_ids": [0, 1, 2]}, "hash_ids", "1 or 2 of them"),
    ({**GOOD, "hash_ids": []}, "hash_ids", "1 or 2 of them"),
    ({**GOOD, "hash_ids": [0, "1"]}, "hash_ids[1]", "a non-negative integer"),
    ({**GOOD, "hash_ids": [-1, 1]}, "hash_ids[0]", "a non-negative integer"),
    ({**GOOD, "hash_ids": [False, 1]}, "hash_ids[0]", "a non-negative integer"),
    ({**GOOD, "hash_ids": [1, 0]}, "hash_ids[0]", "an id that names its whole prefix"),
    ({**GOOD, "hash_ids": [5, 1]}, "hash_ids[1]", "an id that names its whole prefix"),
    ({**GOOD, "hash_ids": [4, 4]}, "hash_ids[1]", "an id that names its whole prefix"),
    ({**TOKENS, "tokens": []}, "tokens", "at least one token"),
    ({**TOKENS, "tokens": "abc"}, "tokens", "a list"),
    ({**TOKENS, "tokens": [1, 2**32]}, "tokens[1]", "an integer from 0 to 4294967295"),
    ({**TOKENS, "hash_ids": [0]}, "hash_ids", "not to stand beside tokens"),
    ({**TOKENS, "input_length": 4}, "input_length", "3, the number of tokens"),
    (without(TOKENS, "output_length"), "output_length", "to be given, or else output_tokens"),
    ({**TOKENS, "output_tokens": [1]}, "output_length", "1, the number of output_tokens"),
    ({**TOKENS, "output_tokens": [-1]}, "output_tokens[0]", "an integer from 0"),
]


@pytest.mark.parametrize(("line", "field", "expected"), BAD)
def test_an_ill_formed_line_is_named(tmp_path, line, field, expected):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(FileError, match=re.escape(expected)) as caught:
        list(read_trace(path, tokens_per_id=8))
    error = caught.value
    assert (error.path, error.line, error.field) == (path, 2, field)
    assert "\n" not in str(error)


def test_time_must_not_run_backwards(tmp_path):
    path = write(tmp_path, {**GOOD, "timestamp": 5}, {**GOOD, "timestamp": 4.5})
    with pytest.raises(FileError, match="at least 5") as caught:
        list(read_trace(path, 8))
    assert (caught.value.line, caught.value.field) == (2, "timestamp")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_trace_without_requests_is_refused(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileError, match="at least one request"):
        list(read_trace(str(path)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(FileError, match="a readable file"):
        list(read_trace(str(tmp_path / "absent.jsonl")))
    with pytest.raises(FileError, match="a readable file"):
        list(read_trace(str(tmp_path)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "tokens", "output_tokens"])


@given(
    lines=st.lists(st.binary(max_size=60) | st.dictionaries(FIELDS, JSON | st.lists(st.integers(-1, 9))), max_size=4)
)
@example(lines=[b'{"timestamp": 1e999, "tokens": [1], "output_length": 1}'])
@example(lines=[b'{"timestamp": 0, "tokens": [1], "output_length": 99999999999999999999999}'])
def test_no_input_makes_anything_but_requests_or_a_file_error(tmp_path, lines):
    path = write(tmp_path, GOOD, *lines)
    told = ""
    try:
        requests = list(read_trace(path, 8))
    except FileError as error:
        told = f"{error} (line {error.line})"
        requests = []
    assert requests or re.match(rf"{re.escape(path)}:(\d+)\b.*expected .* \(line \1\)", told, re.DOTALL)
    assert all(request.input_length >= 1 and request.output_length >= 0 for request in requests)

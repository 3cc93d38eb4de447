"""The JSON Schema, the typed values and the logs say the same."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jsonschema
import msgspec
import pytest

from hkv.contract.registry import dialect_of
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import FORMAT
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.errors import FileError
from hkv.oracle import log_schema
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import encode, parse_log
from hkv.oracle.record import record
from hkv.spec import KINDS, log_variants
from tests.oracle import sample
from tests.oracle.test_log_file import EXTRAS, HEADERS, LINES, LIVE_LINES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCHEMA = json.loads(log_schema.PATH.read_text())
DEFINITIONS = SCHEMA["$defs"]

VLLM = dialect_of("vllm-0.33")


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": DEFINITIONS})


HEADER = validator("header")
OPERATION = {**{version: validator(f"operation_{version}") for version in (1, 2, 3)}, 4: validator("operation")}


def validate(lines: list[Any]) -> None:
    HEADER.validate(lines[0])
    for line in lines[1:]:
        OPERATION[lines[0]["oplog"]].validate(line)


def test_the_published_file_is_what_the_structs_say() -> None:
    assert log_schema.PATH.read_bytes() == log_schema.text()


@pytest.mark.parametrize("feature", FEATURES)
def test_recorded_logs_validate(feature: str) -> None:
    paths = sorted((ROOT / "tests" / "data" / "oplogs").glob(f"{feature}-*.jsonl"))[:3]
    assert paths
    for path in paths:
        validate([json.loads(line) for line in path.read_bytes().splitlines()])


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("feature", FEATURES)
def test_generated_logs_validate(feature: str, version: int) -> None:
    recording = record(engine_factory("numpy"), feature, 5, version, 6)
    lines = [msgspec.json.encode(recording.header)]
    lines += [encode(VLLM, *pair) for pair in zip(recording.operations, recording.answers, strict=True)]
    validate([json.loads(line) for line in lines])


def test_shared_recordings_validate(shared_dir: pathlib.Path) -> None:
    for path in sorted((shared_dir / "oplogs").glob("*.jsonl"))[::32]:
        validate([json.loads(line) for line in path.read_bytes().splitlines()])


def agree(struct: Any, definition: dict[str, Any], always: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """The struct and the definition have the same fields, and want the same ones; `always` ones only the file wants."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    tag = {info.tag_field} if info.tag_field else set()
    assert set(definition["properties"]) == {field.encode_name for field in info.fields} | tag
    required = {field.encode_name for field in info.fields if field.required}
    assert set(definition["required"]) == required | tag | always
    assert definition["additionalProperties"] is False


def test_structs_and_schema_agree() -> None:
    agree(oplog.Header, DEFINITIONS["Header"])
    agree(oplog.ExtraKeys, DEFINITIONS["ExtraKeys"])
    agree(oplog.Hit, DEFINITIONS["Hit"])
    agree(oplog.Allocation, DEFINITIONS["Allocation"])
    agree(oplog.CacheState, DEFINITIONS["CacheState"])
    for name, struct in FORMAT.operations.items():
        definition = DEFINITIONS[struct.__name__]
        assert definition["properties"]["op"] == {"enum": [name]}
        agree(struct, definition, {"want"} & set(struct.__struct_fields__))
    stored, removed, cleared = DEFINITIONS["CacheEvent"]["oneOf"]
    fields = set(oplog.CacheEvent.__struct_fields__)
    assert set(stored["properties"]) == fields
    assert set(removed["properties"]) < fields
    assert set(cleared["properties"]) == {"type"}
    operations = {reference["$ref"].rpartition("/")[2] for reference in DEFINITIONS["operation"]["oneOf"]}
    assert operations == {struct.__name__ for struct in FORMAT.operations.values()}


def test_kinds_and_schema_agree() -> None:
    for reference in DEFINITIONS["group"]["oneOf"]:
        kind = reference["$ref"].rpartition("/")[2]
        definition = DEFINITIONS[kind]
        variants = {cls.written.variant for cls in log_variants(KINDS[kind])}
        assert set(definition["properties"]) == {"kind", "block_size", *KINDS[kind].written.fields} | variants


@pytest.mark.parametrize(("changes", "field", "value", "expected"), HEADERS)
def test_bad_headers(changes: dict[str, Any], field: str, value: object, expected: str) -> None:
    """Headers that the schema refuses, the parser refuses; the parser also knows rules that no schema can say."""
    header = {**sample.HEADER, **changes}
    if not HEADER.is_valid(header):
        with pytest.raises(FileError):
            parse_log(sample.encode([header]), "a")
    else:
        assert field in ("scheduler_block_size", "bugs")


@pytest.mark.parametrize(("line", "field", "value"), LIVE_LINES)
def test_live_lines(line: dict[str, Any], field: str, value: object) -> None:
    del field, value
    assert OPERATION[3].is_valid(line)
    assert not OPERATION[2].is_valid(line)


@pytest.mark.parametrize(("line", "field", "value", "expected"), LINES)
def test_bad_lines(line: dict[str, Any], field: str, value: object, expected: str) -> None:
    assert OPERATION[1].is_valid(line) == (expected in ("below 8", "arrived", "max_model_len"))


def test_bad_extra_keys() -> None:
    request = {"op": "request", "id": "r1", "tokens": [1, 2, 3]}
    refused = [not OPERATION[2].is_valid({**request, "extra": extra}) for extra, _ in EXTRAS]
    assert refused == [True, True, False, False, False, True, False, True]

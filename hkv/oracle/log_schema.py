"""The JSON schema of logs, `oplog.schema.json`, as the structs of HKV's own dialects say it.

`python -m hkv.oracle.log_schema` writes it anew.
"""

from __future__ import annotations

import inspect
import pathlib
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.oracle.log_file import write_atomically

PATH = pathlib.Path(__file__).with_name("oplog.schema.json")
"""The published file."""

ABOUT = (
    "A log is a header line and operation lines. Definitions of each dialect: header, operation and, of an earlier"
    " version of the format, operation_1; docs/oplog.md says what they mean."
)


def schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of one line of any log."""
    formats = {each.prefix: each for each in (registry.dialect_of(name).log for name in registry.BUILT_IN)}.values()
    lines = [f"{each.prefix}{name}" for each in formats for name in ("header", "operation")]
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "HKV operation log, one line",
        "description": ABOUT,
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in lines],
        "$defs": {name: part for each in formats for name, part in each.schema().items()},
    }
    return _cleaned(found)


def _cleaned(part: Any) -> Any:
    """Descriptions without the indentation of docstrings, which some versions of msgspec keep."""
    if isinstance(part, dict):
        return {
            name: inspect.cleandoc(value) if name == "description" and isinstance(value, str) else _cleaned(value)
            for name, value in part.items()
        }
    return [_cleaned(each) for each in part] if isinstance(part, list) else part


def text() -> bytes:
    """The schema as the published file has it."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=1) + b"\n"


if __name__ == "__main__":
    write_atomically(PATH, text())

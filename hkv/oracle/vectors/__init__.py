"""Conformance vectors: inputs and expected results, as JSON, for tests in languages that HKV is not written in.

`hkv vectors OUT/` writes one file a family; `vectors.schema.json` beside this file describes them. They are made by the
reference and the host-only descriptions, the same ones on every machine.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hkv.connectors.cases import vector_cases
from hkv.contract import registry
from hkv.oracle.log_file import write_all_atomically
from hkv.oracle.vectors import cases

VERSION = 1
"""Version of the format. A family may get further cases under the same version, never other fields or meanings."""

Cases = Callable[[], Iterator[dict[str, Any]]]

FAMILIES: dict[str, tuple[str, Cases]] = {
    **{family: about for dialect in registry.dialects() for family, about in dialect.vectors.items()},
    "pool": ("the order in which blocks are freed, handed out and lose their keys", cases.pool_cases),
    "tables": ("block tables in kernel blocks, and what a forward pass sees of them", cases.table_cases),
    "slots": ("the block and offset of tokens, one or several context-parallel ranks", cases.slot_cases),
    "strides": ("shapes and strides of the six physical orders", cases.stride_cases),
    "addresses": ("the byte address of elements of a cache", cases.address_cases),
    "ranges": ("the bytes of blocks, from the tensors that a connector is told of", vector_cases),
    "chunk_objects": ("what lies where in the chunk objects of an external store", cases.chunk_cases),
}
"""Families of vectors: what each is about, and its cases."""


def schema() -> bytes:
    """The JSON Schema (draft 2020-12) of a file of vectors."""
    return (pathlib.Path(__file__).parent / "vectors.schema.json").read_bytes()


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every family and its file's content, one after the other."""
    for family, (about, made) in FAMILIES.items():
        yield family, {"vectors": VERSION, "family": family, "about": about, "cases": list(made())}


def write_vectors(folder: pathlib.Path, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Writes all families, the schema, and an index with the SHA-256 of each file, all of them or none; returns the
    index."""
    index: dict[str, Any] = {"vectors": VERSION, "dialect": registry.DEFAULT, "files": {}}
    files: dict[str | os.PathLike[str], bytes] = {folder / "vectors.schema.json": schema()}
    for family, document in documents():
        lines = b",\n".join(msgspec.json.encode(case) for case in document["cases"])
        head = msgspec.json.encode({**document, "cases": []})
        data = head[:-2] + b"\n" + lines + b"\n]}\n"
        files[folder / f"{family}.json"] = data
        digest = hashlib.sha256(data).hexdigest()
        index["files"][f"{family}.json"] = {"family": family, "cases": len(document["cases"]), "sha256": digest}
        progress()
    files[folder / "index.json"] = msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"
    write_all_atomically(files)
    return index

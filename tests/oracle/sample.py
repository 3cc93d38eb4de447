"""A small log to spoil."""

from __future__ import annotations

import json
from typing import Any

from hkv.dialects.vllm.log.structs import Header

HEADER: dict[str, Any] = {
    "oplog": 1,
    "dialect": "vllm-0.33",
    "feature": "core",
    "num_blocks": 8,
    "groups": [{"kind": "full_attention", "block_size": 2, "cp_sharded": False}],
    "hash": "sha256_cbor",
    "hash_block_size": 2,
    "scheduler_block_size": 2,
    "hash_lookahead": 0,
    "caching": True,
    "eagle": False,
    "eagle_groups": [],
    "prefill_lookahead": 0,
    "retention_interval": None,
    "partial_hits": False,
    "max_model_len": 64,
    "max_in_flight_tokens": None,
    "context_parallel": 1,
}


def header(**changes: Any) -> Header:
    """The header of the small log with other fields."""
    return Header(**(HEADER | changes))


ALLOCATE: dict[str, Any] = {
    "op": "allocate",
    "id": "r1",
    "new": 3,
    "hit": 0,
    "lookahead": 0,
    "external": 0,
    "delay": False,
    "must_fit": True,
    "reserved": 0,
    "in_flight": 0,
    "want": {"blocks": [[1, 2]]},
}

OPERATIONS: list[dict[str, Any]] = [
    {"op": "step"},
    {"op": "request", "id": "r1", "tokens": [5, 6, 7]},
    {"op": "lookup", "id": "r1", "want": {"hit": 0, "blocks": [[]], "shared_prefix": 0}},
    ALLOCATE,
    {"op": "advance", "id": "r1", "tokens": 3},
    {"op": "append", "id": "r1", "tokens": [8]},
    {"op": "commit", "id": "r1", "tokens": 3},
    {"op": "events", "want": [{"type": "stored", "group": 0, "num_blocks": 1, "block_size": 2, "tokens": [5, 6]}]},
    {"op": "evict", "blocks": [1]},
    {"op": "copies", "want": []},
    {"op": "free", "id": "r1"},
    {"op": "drop", "id": "r1"},
    {"op": "reset", "want": {"ok": True}},
    {"op": "events", "want": [{"type": "removed", "group": 0, "num_blocks": 1}]},
    {"op": "state", "want": {"free": [2, 1, 3, 4, 5, 6, 7], "refs": {}, "rows": {}, "cached": {}}},
]
"""Operations with the answers that the rules of vLLM 0.33 give."""


def encode(lines: list[Any]) -> bytes:
    """A file of these lines."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def sample(**changes: Any) -> bytes:
    """The sample with some header keys changed."""
    return encode([{**HEADER, **changes}, *OPERATIONS])

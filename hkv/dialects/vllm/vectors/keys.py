"""Vectors of prefix keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.log.structs import ExtraKeys
from hkv.keys.chained import KeyChain, digest_by_name, event_hash, group_key, root_key

HASH = "sha256_cbor"
"""The chain hash that depends on nothing but values; those over pickles are Python's own."""

EXTRAS = {
    "nothing": None,
    "adapter": ExtraKeys(lora=["sql", "/adapters/sql"]),
    "salt": ExtraKeys(salt="tenant-7"),
    "empty salt": ExtraKeys(salt=""),
    "images": ExtraKeys(multimodal=[("image-a", 1, 3), ("image-b", 6, 4)]),
    "adapter, salt and image": ExtraKeys(lora=["sql", "/a"], salt="x", multimodal=[("image-a", 0, 6)]),
    "embeddings": ExtraKeys(embeds=[f"{token:04x}" for token in range(16)]),
}


def cases() -> Iterator[dict[str, Any]]:
    """Plain prompts of all lengths around a block, large tokens, look-ahead, and everything that keys cover."""
    for size in (1, 2, 4, 16):
        for length in sorted({0, size - 1, size, size + 1, 3 * size, 3 * size + 1}):
            yield _case(f"{length} tokens in blocks of {size}", list(range(length)), size)
    yield _case("tokens of every width", [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1], 2)
    for lookahead in (1, 2, 3):
        yield _case(f"look-ahead of {lookahead}", list(range(11)), 4, lookahead)
    for name, extra in EXTRAS.items():
        yield _case(name, list(range(16)), 4, 0, extra)
        yield _case(f"{name}, look-ahead of 1", list(range(16)), 4, 1, extra)


def _case(
    name: str, tokens: list[int], size: int, lookahead: int = 0, extra: ExtraKeys | None = None
) -> dict[str, Any]:
    digest = digest_by_name(HASH)
    chain = KeyChain(digest, size, lookahead, identity_of(extra or ExtraKeys()))
    chain.extend(tokens)
    return {
        "name": name,
        "input": {
            "hash": HASH,
            "hash_block_size": size,
            "hash_lookahead": lookahead,
            "tokens": tokens,
            "extra": msgspec.to_builtins(extra),
        },
        "expected": {
            "root": root_key(digest).hex(),
            "keys": [key.hex() for key in chain.keys],
            "keys_of_group_1": [group_key(key, 1).hex() for key in chain.keys],
            "event_hashes": [str(event_hash(key)) for key in chain.keys],
        },
    }

"""Conformance vectors that follow from vLLM 0.33's rules: keys, hits, plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine, identity_of
from hkv.dialects.vllm.log.structs import Answer, ExtraKeys, Header, Hit, LookupOp, Operation
from hkv.dialects.vllm.planning import plan_vllm
from hkv.dialects.vllm.planning.tensors import options_record, plan_record
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.dialects.vllm.traffic.layer_sets import draw_layer_set
from hkv.dialects.vllm.traffic.live import drive
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.errors import HKVError
from hkv.keys.chained import KeyChain, digest_by_name, event_hash, group_key, root_key
from hkv.spec.written import spec_record
from reference.hits import hit_alignment, longest_hit_by_definition

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


def keys() -> Iterator[dict[str, Any]]:
    """Plain prompts of all lengths around a block, large tokens, look-ahead, and everything that keys cover."""
    for size in (1, 2, 4, 16):
        for length in sorted({0, size - 1, size, size + 1, 3 * size, 3 * size + 1}):
            yield _key_case(f"{length} tokens in blocks of {size}", list(range(length)), size)
    yield _key_case("tokens of every width", [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1], 2)
    for lookahead in (1, 2, 3):
        yield _key_case(f"look-ahead of {lookahead}", list(range(11)), 4, lookahead)
    for name, extra in EXTRAS.items():
        yield _key_case(name, list(range(16)), 4, 0, extra)
        yield _key_case(f"{name}, look-ahead of 1", list(range(16)), 4, 1, extra)


def _key_case(
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


HIT_SEEDS = 12
STEPS = 10
PER_SEED = 4
"""Lookups of one seed that are kept: those that hit something first."""


def hits() -> Iterator[dict[str, Any]]:
    """Some lookups of every feature."""
    for feature in FEATURES:
        for seed in range(HIT_SEEDS):
            choices = RandomChoices(seed)
            header = draw_header(choices, feature)
            seen: list[dict[str, Any]] = []
            engine = NumpyEngine(header)

            def perform(
                operation: Operation, engine: NumpyEngine = engine, header: Header = header, seen: list = seen
            ) -> Answer:
                answer = apply(engine, operation)
                if isinstance(operation, LookupOp) and isinstance(answer, Hit):
                    seen.append(_hit_case(engine, header, operation.id, answer))
                return answer

            drive(header, choices, perform, STEPS)
            seen.sort(key=lambda case: case["expected"]["hit"] == 0)
            for number, case in enumerate(seen[:PER_SEED]):
                yield {"name": f"{feature}, seed {seed}, lookup {number}", **case}


def _hit_case(engine: NumpyEngine, header: Header, id: str, answer: Hit) -> dict[str, Any]:
    config: VllmConfig = engine.manager.config
    request, size = engine.manager.requests[id], config.hash_block_size
    keys = request.keys
    held = {
        (group, (index + 1) * size)
        for index, key in enumerate(keys)
        for group in range(len(header.groups))
        if engine.manager.pool.find(key, (group,)) is not None
    }
    by_definition = longest_hit_by_definition(config, lambda *entry: entry in held, request.num_tokens)
    return {
        "input": {
            "header": msgspec.to_builtins(header),
            "num_tokens": request.num_tokens,
            "entries": [list(entry) for entry in sorted(held)],
        },
        "expected": {
            "alignment": hit_alignment(config),
            "by_definition": by_definition,
            "hit": answer.hit,
            "may_differ": sorted(cause.name.lower() for cause in causes(config, request.num_tokens)),
        },
    }


PLAN_SEEDS = 60


def plans() -> Iterator[dict[str, Any]]:
    """Random sets of layers; those that vLLM 0.33's rules refuse say so."""
    for seed in range(PLAN_SEEDS):
        drawn = draw_layer_set(seed)
        expected: dict[str, Any] = {"refused": False, "plan": None}
        try:
            expected["plan"] = plan_record(plan_vllm(drawn.workers, drawn.memory, drawn.options))
        except HKVError:
            expected["refused"] = True
        workers = [{name: spec_record(spec) for name, spec in worker.items()} for worker in drawn.workers]
        yield {
            "name": f"seed {seed}",
            "input": {"workers": workers, "memory": list(drawn.memory), "options": options_record(drawn.options)},
            "expected": expected,
        }

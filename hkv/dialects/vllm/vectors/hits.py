"""Vectors of prefix hits: lookups of random traffic, with what the cache held at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Answer, Header, Hit, LookupOp, Operation
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.dialects.vllm.traffic.live import drive
from hkv.dialects.vllm.traffic.traffic import FEATURES
from reference.hits import hit_alignment, longest_hit_by_definition

SEEDS = 12
STEPS = 10
PER_SEED = 4
"""Lookups of one seed that are kept: those that hit something first."""


def cases() -> Iterator[dict[str, Any]]:
    """Some lookups of every feature."""
    for feature in FEATURES:
        for seed in range(SEEDS):
            choices = RandomChoices(seed)
            header = draw_header(choices, feature)
            seen: list[dict[str, Any]] = []
            engine = NumpyEngine(header)

            def perform(
                operation: Operation, engine: NumpyEngine = engine, header: Header = header, seen: list = seen
            ) -> Answer:
                answer = apply(engine, operation)
                if isinstance(operation, LookupOp) and isinstance(answer, Hit):
                    seen.append(_case(engine, header, operation.id, answer))
                return answer

            drive(header, choices, perform, STEPS)
            seen.sort(key=lambda case: case["expected"]["hit"] == 0)
            for number, case in enumerate(seen[:PER_SEED]):
                yield {"name": f"{feature}, seed {seed}, lookup {number}", **case}


def _case(engine: NumpyEngine, header: Header, id: str, answer: Hit) -> dict[str, Any]:
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

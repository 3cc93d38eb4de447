"""Conformance vectors that follow from vLLM 0.33's rules: keys, hits, plans; and the layer sets drawn for plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.traffic import Choices, RandomChoices
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.log.structs import Answer, ExtraKeys, Header, Hit, LookupOp, Operation
from hkv.dialects.vllm.planning import plan_vllm
from hkv.dialects.vllm.planning.plan import PlanOptions, options_record, plan_record
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.dialects.vllm.traffic.live import drive
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.errors import HKVError
from hkv.keys.chained import KeyChain, digest_by_name, event_hash, group_key, root_key
from hkv.layout.orders import Order
from hkv.spec import LayerSpec, RequestLimits
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
            engine = PlainEngine(header)

            def perform(
                operation: Operation, engine: PlainEngine = engine, header: Header = header, seen: list = seen
            ) -> Answer:
                answer = apply(engine, operation)
                if isinstance(operation, LookupOp) and isinstance(answer, Hit):
                    seen.append(_hit_case(engine, header, operation.id, answer))
                return answer

            drive(header, choices, perform, STEPS)
            seen.sort(key=lambda case: case["expected"]["hit"] == 0)
            for number, case in enumerate(seen[:PER_SEED]):
                yield {"name": f"{feature}, seed {seed}, lookup {number}", **case}


def _hit_case(engine: PlainEngine, header: Header, id: str, answer: Hit) -> dict[str, Any]:
    config, size, num_tokens = engine.config, engine.config.hash_block_size, engine.record(id).tokens
    held = {
        (group, (index + 1) * size)
        for index, key in enumerate(engine.keys(id))
        for group in range(len(header.groups))
        if engine.has(group, key)
    }
    by_definition = longest_hit_by_definition(config, lambda *entry: entry in held, num_tokens)
    return {
        "input": {
            "header": msgspec.to_builtins(header),
            "num_tokens": num_tokens,
            "entries": [list(entry) for entry in sorted(held)],
        },
        "expected": {
            "alignment": hit_alignment(config),
            "by_definition": by_definition,
            "hit": answer.hit,
            "may_differ": sorted(cause.name.lower() for cause in causes(config, num_tokens)),
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


# Random sets of layers and the options of a plan, for comparing planners; geometry small, coincidences frequent.


@dataclasses.dataclass(frozen=True)
class LayerSet:
    """One case for planners.

    Attributes:
      workers: each worker's layers by name.
      memory: bytes for the cache on each.
      options: options that the plan is made with.
    """

    workers: tuple[dict[str, LayerSpec], ...]
    memory: tuple[int, ...]
    options: PlanOptions


def draw_layer_set(seed: int) -> LayerSet:
    """The layer set of that number, of all classes of layers in the shares that they say (`planned_weight`)."""
    choices = RandomChoices(seed)
    weighed = [cls for _, cls in sorted(kinds.layer_classes().items()) for _ in range(cls.planned_weight)]
    drawn = [choices.pick(weighed).draw_planned(choices) for _ in range(choices.pick((1, 1, 2, 2, 3, 4)))]
    if choices.chance(30):
        drawn.append(kinds.layer(choices.pick(drawn)).draw_near(choices))
    layers = [choices.pick(drawn) for _ in range(choices.integer(1, 14))]
    if choices.chance(40):
        layers = [drawn[i % len(drawn)] for i in range(len(layers))]
    if choices.chance(15):
        layers.append(dataclasses.replace(choices.pick(drawn), is_draft=True))
    named = {f"layer{i}": spec for i, spec in enumerate(layers)}
    options = _draw_options(choices)
    stages = choices.pick((1, 1, 1, 2, 3))
    cuts = [len(named) * i // stages for i in range(stages + 1)]
    items = list(named.items())
    workers = tuple(dict(items[cuts[i] : cuts[i + 1]]) for i in range(stages))
    workers = tuple(worker for worker in workers if worker)
    memory = tuple(choices.integer(1, 400) * 100_000 for _ in workers)
    return LayerSet(workers, memory, options)


def _draw_options(choices: Choices) -> PlanOptions:
    limits = RequestLimits(
        max_model_len=choices.pick((16, 100, 1000, 5000)),
        max_in_flight_tokens=choices.pick((1, 16, 64, 512)),
        max_num_encoder_input_tokens=choices.pick((1, 16, 100, 1000)),
        context_parallel=choices.pick((1, 1, 1, 2)),
        mamba_mode=choices.pick(("align", "align", "none")),
    )
    return PlanOptions(
        limits=limits,
        layout=choices.pick([order.value for order in Order]),
        tensor_parallel=choices.pick((1, 2, 4, 8)),
        hybrid=choices.chance(85),
        auto_fit=choices.chance(30),
        num_blocks=choices.pick((None, None, None, 50)),
        eagle=choices.chance(30),
        prefill_lookahead=choices.pick((0, 0, 0, 1, 3)),
        caching=choices.chance(80),
        prefix_match_unit=choices.pick((None, None, None, None, 4, 8)),
    )

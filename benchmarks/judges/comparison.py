"""HKV's reading and plan of a config held against a recorded answer of vLLM's own model class."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.judges.records import plain, split_name, unpack
from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.planning.cache_plan import serve
from hkv.dialects.vllm.planning.engine_settings import ATTENTION_FREE
from hkv.errors import HKVError
from hkv.model.huggingface import Model, ReadOptions, read_model
from hkv.spec import AttentionSpec, ChunkedLocal, LayerSpec, Mamba, MLAAttention, SlidingWindow

KV_MEMORY = 80 << 30
"""Bytes for the cache with which the recorded plans were made."""

COMPARED = (
    "kind",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "sliding_window",
    "attention_chunk_size",
    "non_causal",
    "state_content_bytes",
    "tokens_per_state",
    "extra_retained_tokens",
    "cache_role",
    "shapes",
    "dtypes",
    "num_prefill_checkpoint_blocks",
    "prefill_checkpoint_alignment",
    "shares",
)
"""Fields of a vLLM spec that say what a layer caches; the others say how a kernel wants its block, or follow."""

DEFAULTS: Mapping[str, Any] = {
    "non_causal": False,
    "tokens_per_state": 1,
    "extra_retained_tokens": 0,
    "cache_role": "SPARSE",
    "num_prefill_checkpoint_blocks": 0,
}
"""Values that a record leaves out, where they are not None."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value in which HKV and a judge differ.

    Attributes:
      field: what it says: of a layer `layers.3 head_size`, of the plan `blocks`.
      ours: HKV's value.
      theirs: the judge's.
    """

    field: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.ours} here, {self.theirs} in vLLM"


def read(config: Mapping[str, Any], tensor_parallel: int, block_size: int | None = None) -> Model | str:
    """HKV's reading, or the message with which it refuses.

    Args:
      config: the content of a config.json.
      tensor_parallel: ranks.
      block_size: tokens per block, None for the reader's default.
    """
    try:
        return read_model(config, ReadOptions(tensor_parallel=tensor_parallel, block_size=block_size))
    except HKVError as error:
        return str(error)


def layer_differences(model: Model, answer: Mapping[str, Any]) -> list[Difference]:
    """Differences in what the layers cache, the first of each field."""
    mine = {layer.name: described(layer.spec) for layer in model.layers if layer.spec}
    shared = {name: {"shares": split_name(target)[1]} for name, target in unpack(answer["shared"]).items()}
    other = {name: compared(record) for name, record in unpack(answer["layers"]).items()}
    sides = [_by_index(side) for side in (mine | _shared(model), other | shared)]
    if list(sides[0]) != list(sides[1]):
        # An engine may count the layers of a kind, or of a part of the model, for themselves: the order decides then.
        sides = [_by_kind(side) for side in sides]
    ours, theirs = sides
    found: dict[str, Difference] = {}
    for place in [*ours, *(place for place in theirs if place not in ours)]:
        here, there = ours.get(place, []), theirs.get(place, [])
        if len(here) != len(there):
            kinds = [dict(collections.Counter(each.get("kind", "shared") for each in side)) for side in (here, there)]
            found.setdefault("caches", Difference(f"{place} caches", *kinds))
            continue
        for one, two in zip(here, there, strict=True):
            for field in COMPARED:
                if one.get(field) != two.get(field):
                    values = one.get(field), two.get(field)
                    found.setdefault(field, Difference(f"{place} {field}", *values))
    return list(found.values())


def plan_differences(model: Model, answer: Mapping[str, Any]) -> list[Difference]:
    """Differences in the longest request, or in the blocks, tokens and concurrency of the plan."""
    plan = answer["plan"]
    if not plan:
        return []  # nothing is cached
    if model.max_model_len != answer["max_model_len"]:
        return [Difference("max_model_len", model.max_model_len, answer["max_model_len"])]
    caching = model.model_type not in ATTENTION_FREE and not model.encoder_tokens  # as vLLM's default is
    try:
        served = serve(
            model,
            KV_MEMORY,
            max_in_flight_tokens=answer["max_in_flight_tokens"],
            max_num_encoder_input_tokens=answer["max_num_batched_tokens"],
            caching=caching,
        )
    except HKVError as error:
        return [] if "refused" in plan else [Difference("plan", str(error), plan["line"])]
    if "refused" in plan:
        return [Difference("plan", f"{served.plan.num_blocks} blocks", plan["refused"])]
    concurrency = served.plan.reserved_concurrency
    pairs = {
        "blocks": (served.plan.num_blocks, plan["blocks"]),
        "concurrency": (round(concurrency, 6), round(plan["concurrency"], 6)),
        "tokens": (int(concurrency * model.max_model_len), plan["tokens"]),
    }
    return [Difference(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def cache_differences(model: Model, answer: Mapping[str, Any]) -> list[Difference]:
    """The first difference of HKV's layers from the caches that transformers makes, on one rank.

    A latent may be kept expanded there, and a convolution's state with one more column: of latents only the layers are
    counted, of states the elements of the recurrent one.
    """
    ours = [_as_cache(layer.spec) for layer in model.layers if layer.spec is not None]
    theirs = [_of_cache(record) for record in unpack(answer["layers"]).values()]
    if any(isinstance(layer.spec, MLAAttention) for layer in model.layers):
        ours, theirs = [("layer",)] * len(ours), [("layer",)] * len(theirs)
    if len(ours) != len(theirs):
        return [Difference("caches", len(ours), len(theirs))]
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [Difference(f"layers.{index} cache", *pair) for index, pair in pairs if pair[0] != pair[1]][:1]


def _as_cache(spec: LayerSpec) -> tuple[Any, ...]:
    """Heads, sizes and window of an attention layer, or elements of the recurrent state."""
    if isinstance(spec, AttentionSpec):
        window = (
            spec.window if isinstance(spec, SlidingWindow) else spec.chunk if isinstance(spec, ChunkedLocal) else None
        )
        return spec.num_kv_heads, spec.head_size, spec.value_size, window
    return ("state", math.prod(spec.shapes[-1])) if isinstance(spec, Mamba) else (spec.kind,)


def _of_cache(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same of a layer of the library's cache."""
    if "num_kv_heads" in record:
        sizes = tuple(record[name] for name in ("num_kv_heads", "head_size", "head_size_v"))
        return *sizes, record.get("sliding_window")
    shapes = record.get("recurrent_states") or record.get("conv_states") or [[0]]
    return "state", math.prod(shapes[-1])


def described(spec: LayerSpec) -> dict[str, Any]:
    """A layer's cache in the names of vLLM's specs, where not at its default."""
    served = layer(spec)
    spec = served.spanning(spec.block_size * served.checkpoint_alignment, None)  # as planning lengthens blocks
    found: dict[str, Any] = {"kind": layer(spec).vllm_name, "block_size": spec.block_size}
    if isinstance(spec, AttentionSpec):
        for field in ("num_kv_heads", "head_size", "dtype", "state_content_bytes", "tokens_per_state"):
            found[field] = getattr(spec, field)
        found["head_size_v"] = spec.value_size
        if spec.quantization == "fp8_per_tensor":
            found["dtype"] = "uint8"  # as vLLM's pools hold float8
    else:
        found["dtypes"] = tuple(dtype for _, dtype in spec.state_tensors)
    for theirs, ours in layer(spec).vllm_fields.items():
        found[theirs] = getattr(spec, ours)
    return compared({name: plain(value) for name, value in found.items()})


def compared(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that are compared, without those at their defaults."""
    found = {name: record[name] for name in COMPARED if record.get(name) is not None}
    if isinstance(found.get("cache_role"), str):
        found["cache_role"] = found["cache_role"].upper()
    if found["kind"].endswith("MambaSpec") and not found.get("num_prefill_checkpoint_blocks"):
        found.pop("prefill_checkpoint_alignment", None)
    elif found.get("prefill_checkpoint_alignment") == record.get("block_size"):
        found["prefill_checkpoint_alignment"] = "the block's tokens"
    if "MLA" in found["kind"] and not found.get("head_size_v"):
        found.pop("head_size_v", None)
    return {name: value for name, value in found.items() if value != DEFAULTS.get(name)}


def _shared(model: Model) -> dict[str, dict[str, Any]]:
    return {layer.name: {"shares": split_name(layer.shares)[1]} for layer in model.layers if layer.shares}


def _by_kind(layers: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for description in (each for several in layers.values() for each in several):
        found.setdefault(description.get("kind", "shared"), []).append(description)
    return dict(sorted(found.items()))


def _by_index(layers: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for name, description in layers.items():
        found[split_name(name)[1]].append(description)
    return {
        f"layers.{index}": sorted(found[index], key=lambda each: json.dumps(each, sort_keys=True))
        for index in sorted(found)
    }

"""Random sets of layers and the options of a plan, for comparing planners; geometry small, coincidences frequent."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from hkv.dialects.vllm.planning.options import PlanOptions
from hkv.layout.orders import Order
from hkv.spec import (
    AttentionSpec,
    ChunkedLocal,
    FullAttention,
    HiddenState,
    KernelPages,
    LayerSpec,
    Mamba,
    MLAAttention,
    OpaqueState,
    RequestLimits,
    SlidingWindow,
    SlidingWindowMLA,
)


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
    """The layer set of that number."""
    draw = random.Random(seed)
    kinds = [_draw_spec(draw) for _ in range(draw.choice((1, 1, 2, 2, 3, 4)))]
    if draw.random() < 0.3:
        kinds.append(_near(draw, draw.choice(kinds)))
    layers = [draw.choice(kinds) for _ in range(draw.randint(1, 14))]
    if draw.random() < 0.4:
        layers = [kinds[i % len(kinds)] for i in range(len(layers))]
    drafts = draw.randint(0, 1) if draw.random() < 0.3 else 0
    layers += [dataclasses.replace(draw.choice(kinds), is_draft=True) for _ in range(drafts)]
    named = {f"layer{i}": spec for i, spec in enumerate(layers)}
    options = _draw_options(draw)
    stages = draw.choice((1, 1, 1, 2, 3))
    cuts = [len(named) * i // stages for i in range(stages + 1)]
    items = list(named.items())
    workers = tuple(dict(items[cuts[i] : cuts[i + 1]]) for i in range(stages))
    workers = tuple(worker for worker in workers if worker)
    memory = tuple(draw.randint(1, 400) * 100_000 for _ in workers)
    return LayerSet(workers, memory, options)


def _draw_options(draw: random.Random) -> PlanOptions:
    length = draw.choice((16, 100, 1000, 5000))
    limits = RequestLimits(
        max_model_len=length,
        max_in_flight_tokens=draw.choice((1, 16, 64, 512)),
        context_parallel=draw.choice((1, 1, 1, 2)),
        mamba_mode=draw.choice(("align", "align", "none")),
    )
    return PlanOptions(
        limits=limits,
        layout=draw.choice([order.value for order in Order]),
        tensor_parallel=draw.choice((1, 2, 4, 8)),
        hybrid=draw.random() < 0.85,
        auto_fit=draw.random() < 0.3,
        num_blocks=draw.choice((None, None, None, 50)),
        eagle=draw.random() < 0.3,
        prefill_lookahead=draw.choice((0, 0, 0, 1, 3)),
        caching=draw.random() < 0.8,
        prefix_match_unit=draw.choice((None, None, None, None, 4, 8)),
    )


def _draw_spec(draw: random.Random) -> LayerSpec:
    return draw.choice((_full, _full, _window, _window, _chunked, _mla, _mla, _window_mla, _mamba, _opaque, _hidden))(
        draw
    )


def _near(draw: random.Random, spec: LayerSpec) -> LayerSpec:
    """The same layer but for one thing."""
    if not isinstance(spec, AttentionSpec):
        return dataclasses.replace(spec, block_size=spec.block_size * 2)
    changes: list[Callable[[], LayerSpec]] = [
        lambda: dataclasses.replace(spec, block_size=spec.block_size * 2, page_size_padded=None),
        lambda: dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * 2, page_size_padded=None),  # type: ignore[call-arg]
        lambda: dataclasses.replace(spec, head_size=spec.head_size * 2, page_size_padded=None),  # type: ignore[call-arg]
    ]
    return draw.choice(changes)()


def _geometry(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "block_size": draw.choice((4, 8, 16, 16, 32)),
        "num_kv_heads": draw.choice((1, 1, 2, 4)),
        "head_size": draw.choice((8, 16, 16, 24, 32)),
        "dtype": draw.choice(("bfloat16", "bfloat16", "float32", "uint8")),
        "cp_sharded": draw.random() < 0.5,
        "max_tp_shards": draw.choice((None, None, 1, 4)),
    }
    if draw.random() < 0.15:
        fields["block_stride_alignment"] = draw.choice((64, 100, 512, KernelPages(8), KernelPages(6)))
    if draw.random() < 0.15:
        fields["quantization"] = draw.choice(("fp8_per_tensor", "int8_per_token_head"))
    if draw.random() < 0.15:
        fields["state_content_bytes"] = draw.choice((36, 64, 72))
    return fields


def _replicated(fields: dict[str, Any]) -> dict[str, Any]:
    fields["cp_sharded"] = False
    return fields


def _padded(draw: random.Random, spec: LayerSpec) -> LayerSpec:
    if draw.random() < 0.15:
        page = spec.page_size_bytes
        return dataclasses.replace(spec, page_size_padded=draw.choice((page, page + 64, 2 * page)))  # type: ignore[call-arg]
    return spec


def _full(draw: random.Random) -> LayerSpec:
    fields = _geometry(draw)
    if draw.random() < 0.2:
        fields["head_size_v"] = draw.choice((8, 16))
    if draw.random() < 0.15:
        fields["sliding_window"] = draw.choice((32, 64))
    return _padded(draw, FullAttention(**fields))


def _window(draw: random.Random) -> LayerSpec:
    return _padded(draw, SlidingWindow(**_replicated(_geometry(draw)), window=draw.choice((1, 16, 40, 256))))


def _chunked(draw: random.Random) -> LayerSpec:
    return _padded(draw, ChunkedLocal(**_replicated(_geometry(draw)), chunk=draw.choice((16, 64, 1024))))


def _latent(draw: random.Random) -> dict[str, Any]:
    fields = _geometry(draw) | {"num_kv_heads": 1}
    if draw.random() < 0.4:
        fields["alignment"] = draw.choice((64, 512, 576))
    if not isinstance(fields.get("block_stride_alignment"), KernelPages):
        fields["tokens_per_state"] = draw.choice((1, 1, 2, 4))
    return fields


def _mla(draw: random.Random) -> LayerSpec:
    role = draw.choice((None, None, None, "indexer"))
    return MLAAttention(**_latent(draw), cache_role=role)


def _window_mla(draw: random.Random) -> LayerSpec:
    return SlidingWindowMLA(**_replicated(_latent(draw)), window=draw.choice((8, 16, 128)))


def _mamba(draw: random.Random) -> LayerSpec:
    shapes = tuple((draw.choice((2, 3, 8)), draw.choice((16, 32))) for _ in range(draw.randint(1, 2)))
    return _padded(
        draw,
        Mamba(
            block_size=draw.choice((8, 16, 64)),
            shapes=shapes,
            dtypes=tuple(draw.choice(("float32", "bfloat16")) for _ in shapes),
            num_speculative_blocks=draw.choice((0, 0, 2)),
            num_prefill_checkpoint_blocks=draw.choice((0, 0, 1)),
        ),
    )


def _opaque(draw: random.Random) -> LayerSpec:
    return OpaqueState(block_size=draw.choice((4, 8)), entry_bytes=draw.choice((16, 64, 100)))


def _hidden(draw: random.Random) -> LayerSpec:
    return HiddenState(block_size=draw.choice((8, 16)), num_kv_heads=1, head_size=draw.choice((64, 512, 4096)))

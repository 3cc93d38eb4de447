"""A model in RTP-LLM's terms: a description of every layer's caches, and the sizes of its attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hkv.dialects.rtp_llm.planning.blocks import block_of, tail_blocks
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, hybrid_tags
from hkv.dialects.rtp_llm.planning.sizes import OpaqueRegion
from hkv.errors import PlanError
from hkv.model.group_policy import (
    DEFAULT_TAG,
    CacheDescription,
    CpSlice,
    GroupType,
    LayerDescription,
    MemoryPlacement,
    group_type_of,
)
from hkv.model.huggingface import Model
from hkv.spec import LayerSpec, attention_of

ORDINARY_BLOCK, LONG_BLOCK = 64, 256
"""Tokens of a block that nobody set, and those that DeepSeek-V4 then has (RTP-LLM)."""

MATRICES = ("value heads", "rows", "columns")
"""Axes of a recurrent state; a convolution's has fewer."""


@dataclasses.dataclass(frozen=True)
class DescribedModel:
    """Description of a model's caches, as its author would write it: in the server's blocks, with all ranks' heads.

    Where there are latents, `latent_sizes` are the elements of one and of its rotary key; `indexer_size` is a sparse
    indexer's key, which every latent layer then has next to it, where there is room (`PoolPlan.unindexed`).
    """

    layers: tuple[LayerDescription, ...]
    latent_sizes: tuple[int, int] | None = None
    indexer_size: int | None = None


def describe_model(model: Model, options: RtpOptions, *, draft: bool = False) -> DescribedModel:
    """The descriptions that RTP-LLM's Python side makes of a model.

    Layers of attention alone have the tag `default`; next to states, `full` and `linear0`, `linear1`, ...; with a pool
    a group, each type's name, numbered where blocks or windows' tails differ; DeepSeek-V4's, its seven.
    """
    if model.tensor_parallel != 1:
        expected = "1 where RTP-LLM splits the heads by its own rule: give its ranks to RtpOptions"
        raise PlanError("tensor_parallel of the model", model.tensor_parallel, expected)
    if model.model_type == "deepseek_v4":
        return _dsv4(model, options)
    if options.pinned:
        raise PlanError("pinned", True, f"False for {model.model_type}, which has no pools of fixed size")
    caches = _one_cache_each(model)
    specs = [_served(spec, options) for spec, _ in caches]
    indexed = {indexer for _, indexer in caches}
    if len(indexed) > 1:
        raise PlanError("indexers", len(indexed), "one for every layer or none, under RTP-LLM")
    described = DescribedModel((), model.latent_sizes, model.indexer_size if True in indexed else None)
    tags = _tags(described, specs, options, draft)
    layers = (LayerDescription(caches=(_cache(tag, spec),)) for tag, spec in zip(tags, specs, strict=True))
    return dataclasses.replace(described, layers=tuple(layers))


def _served(spec: LayerSpec, options: RtpOptions) -> LayerSpec:
    """A layer in the server's blocks, its recurrent state in the server's element type."""
    spec = dataclasses.replace(spec, block_size=options.block_size)
    shapes: tuple[tuple[int, ...], ...] = getattr(spec, "shapes", ())  # of recurrent states; others have none
    dtypes: tuple[str, ...] = getattr(spec, "dtypes", ())
    if not shapes:
        return spec
    served = (
        options.state_dtype if len(shape) == len(MATRICES) else dtype
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return dataclasses.replace(spec, **{"dtypes": tuple(served)})


def _cache(tag: str, spec: LayerSpec) -> CacheDescription:
    """One layer's cache; a window or chunk keeps as many blocks at the end as its next query reads.

    It is a state cache, as the windows of RTP-LLM's own descriptions are: a hit brings the block before the next token.
    """
    if not spec.most_read:
        return CacheDescription(tag=tag, spec=spec)
    return CacheDescription(tag=tag, spec=spec, state_cache=True, active_tail_blocks=tail_blocks(spec))


def _tags(described: DescribedModel, specs: Sequence[LayerSpec], options: RtpOptions, draft: bool) -> Sequence[str]:
    kinds = [group_type_of(spec) for spec in specs]
    if options.pools == "shared":
        return (DEFAULT_TAG,) * len(kinds) if set(kinds) == {GroupType.FULL} else hybrid_tags(kinds)
    blocks = [block_of(spec, options, described.latent_sizes) for spec in specs]
    if draft and set(kinds) == {GroupType.FULL} and len(set(blocks)) == 1:
        return (DEFAULT_TAG,) * len(kinds)
    kept = [(block, tail_blocks(spec) if spec.most_read else 0) for block, spec in zip(blocks, specs, strict=True)]
    differing: dict[GroupType, list[object]] = {}
    for kind, each in zip(kinds, kept, strict=True):
        if each not in differing.setdefault(kind, []):
            differing[kind].append(each)
    return [
        kind.name.lower() + ("" if len(differing[kind]) == 1 else str(differing[kind].index(each)))
        for kind, each in zip(kinds, kept, strict=True)
    ]


def _one_cache_each(model: Model) -> list[tuple[LayerSpec, bool]]:
    """Each layer's cache and, of a latent one, whether an indexer is next to it."""
    layers: dict[int, list[LayerSpec]] = {}
    for layer in model.layers:
        if layer.spec is not None:
            layers.setdefault(layer.index, []).append(layer.spec)
    result = []
    for index, (first, *rest) in layers.items():
        if any(getattr(spec, "cache_role", None) != "indexer" for spec in rest) or len(rest) > 1:
            raise PlanError(f"layers.{index}", 1 + len(rest), "one cache, and an indexer at most, under RTP-LLM")
        result.append((first, bool(rest)))
    return result


def _dsv4(model: Model, options: RtpOptions) -> DescribedModel:
    if options.pools == "shared":
        raise PlanError("pools", "shared", "independent for deepseek_v4, whose groups differ in size")
    vector = attention_of(next(spec for name, spec in model.specs.items() if name.endswith(".window")))
    assert vector is not None
    caches = dsv4_descriptions(
        head_dim=vector.head_size,
        indexer_dim=model.indexer_size or 1,
        float8=vector.dtype == "uint8",
        block_size=LONG_BLOCK if options.block_size == ORDINARY_BLOCK else options.block_size,
        pinned=options.pinned,
    )
    ratios: dict[int, int] = {}
    for layer in model.layers:
        compressed = layer.name.endswith(".compressed")
        tokens = getattr(layer.spec, "tokens_per_state", 1) if compressed else 1
        ratios[layer.index] = max(ratios.get(layer.index, 1), tokens)
    tags = (dsv4_layer_tags(ratios[index]) for index in sorted(ratios))
    return DescribedModel(tuple(LayerDescription(caches=tuple(caches[tag] for tag in each)) for each in tags))


# DeepSeek-V4's seven groups: compressed keys and values, their compressors' states, and the window.

CSA_TAGS = ("csa_kv", "indexer_kv", "indexer_state", "csa_state", "swa_kv")
HCA_TAGS = ("hca_kv", "hca_state", "swa_kv")
PACKED, PACKED_INDEXER, PACKED_ALIGNMENT = 584, 132, 576
EXPLICIT_BLOCKS = 256
"""Blocks of the pool of the rarely compressed state, paid from the budget."""


def dsv4_layer_tags(ratio: int) -> tuple[str, ...]:
    """Groups of a layer that compresses `ratio` tokens into one: 4, 128, or anything else for a window alone."""
    return {4: CSA_TAGS, 128: HCA_TAGS}.get(ratio, ("swa_kv",))


def dsv4_descriptions(
    *, head_dim: int, indexer_dim: int, float8: bool, block_size: int = 256, pinned: bool = False
) -> dict[str, CacheDescription]:
    """The description of each group: packed vectors of one byte an element, else bfloat16; pools may be pinned."""
    vector = PACKED if float8 else 2 * head_dim
    key = PACKED_INDEXER if float8 else 2 * indexer_dim
    alignment = PACKED_ALIGNMENT if float8 else 0
    kv = OpaqueRegion(
        block_size=block_size, state=False, entry_elems=vector, entry_dtype="uint8", count="compressed", ratio=4
    )
    ring = OpaqueRegion(
        block_size=block_size,
        state=True,
        entry_elems=1,
        entry_dtype="float32",
        count="ring",
        ratio=4,
        overlap=1,
        alignment_min_entries=128,
        cp_align_payload=True,
        cp_scale_seq=True,
        cp_slice="payload",
    )
    window = {"entry_elems": vector, "entry_dtype": "uint8", "alignment": alignment, "cp_slice": "stride"}
    rare = dataclasses.replace(ring, ratio=128, overlap=0)
    state = {
        "state_cache": True,
        "cp_slice": CpSlice.PAYLOAD_BYTES,
        "memory_placement": MemoryPlacement.HOST_PINNED if pinned else MemoryPlacement.DEVICE,
    }
    fixed = {
        "enable_prefix_reuse": False,
        "active_tail_blocks": 1,
        "validate_tail_blocks": False,
        "explicit_block_num": EXPLICIT_BLOCKS,
        "charge_to_paged_budget": not pinned,
    }
    described: dict[str, tuple[OpaqueRegion, dict[str, Any]]] = {
        "csa_kv": (dataclasses.replace(kv, alignment=alignment), {}),
        "hca_kv": (dataclasses.replace(kv, ratio=128, alignment=alignment), {}),
        "indexer_kv": (dataclasses.replace(kv, entry_elems=key), {}),
        "indexer_state": (dataclasses.replace(ring, entry_elems=4 * indexer_dim), state),
        "csa_state": (dataclasses.replace(ring, entry_elems=4 * head_dim), state),
        "hca_state": (dataclasses.replace(rare, entry_elems=2 * head_dim), {**state, **fixed}),
        "swa_kv": (dataclasses.replace(rare, **window), {**state, "cp_slice": CpSlice.EQUAL_BYTES}),
    }
    return {tag: CacheDescription(tag=tag, spec=spec, **fields) for tag, (spec, fields) in described.items()}


# Draft (MTP, EAGLE) modules in the pools of their target: which group takes which, and what they cost.

ATTENTION = ("mha", "mla")


def draft_module(
    target: Sequence[PoolGroup], draft: Sequence[PoolGroup], module: int, num_layers: int
) -> tuple[PoolGroup, ...]:
    """One module's groups: the target's tags in the target's order (RTP-LLM `mergeMTPModule`).

    A draft group joins the target's group of its tag. A sole one of full attention, tagged `default`, joins the one
    target group that is like it in everything. A target group that no draft group joins stays, without layers. Layers
    are numbered on after the target's, module by module. An indexer's keys have no room: a module's region is sized by
    its layer's spec alone, which leaves them out (RTP-LLM `BlockPoolConfigHelper::createConfig`).
    """
    count = 1 + max(layer for group in draft for layer in group.layers)
    depth = max(len(group.layers) for group in target)
    joining = {_taker(target, draft, group): group for group in draft}
    first = num_layers + module * count
    views = []
    for group in target:
        own = joining.get(group.tag)
        if own is None:
            views.append(dataclasses.replace(group, layers=()))
            continue
        if own.layers != tuple(range(count)):
            raise PlanError(f"layers of draft group {own.tag}", list(own.layers), f"all {count} of the draft, in order")
        if len(group.layers) != depth:
            expected = f"{depth}, as places in the group are to be places in the pool"
            raise PlanError(f"layers of group {group.tag}", len(group.layers), expected)
        layers = tuple(range(first, first + count))
        if own.block.kind == "mla":
            own = dataclasses.replace(own, block=dataclasses.replace(own.block, scale=0), scale_stride=0)
        views.append(dataclasses.replace(own, tag=group.tag, layers=layers, num_blocks=group.num_blocks))
    return tuple(views)


def _taker(target: Sequence[PoolGroup], draft: Sequence[PoolGroup], group: PoolGroup) -> str:
    """The tag of the target's group that a draft group joins."""
    tags = [each.tag for each in target]
    if group.tag in tags:
        mine = target[tags.index(group.tag)]
        if (mine.block.seq_size, mine.kernel_blocks) != (group.block.seq_size, group.kernel_blocks):
            expected = f"{mine.block.seq_size} tokens in {mine.kernel_blocks} kernel blocks, as in the target"
            raise PlanError(f"blocks of draft group {group.tag}", group.block.seq_size, expected)
        return group.tag
    sole = len(draft) == 1 and group.tag == DEFAULT_TAG and group.policy.group_type is GroupType.FULL
    if not sole or group.block.kind not in ATTENTION:
        raise PlanError("draft", group.tag, f"a group of the target's: {', '.join(tags)}")
    fits = [each.tag for each in target if _likeness(each) == _likeness(group)]
    if len(fits) != 1:
        found = f"not several: {', '.join(fits)}" if fits else f"among {', '.join(tags)}"
        raise PlanError("draft", group.tag, f"one group of the target's with the same blocks and policy, {found}")
    return fits[0]


def _likeness(group: PoolGroup) -> tuple[object, ...]:
    block = group.block
    element = block.bytes // max(1, block.elems)
    return group.policy, block.kind, element, block.bytes, block.scale, block.seq_size, group.kernel_blocks

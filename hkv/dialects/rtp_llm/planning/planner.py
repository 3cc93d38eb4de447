"""The plan that RTP-LLM makes of a model: its groups, its pools, its blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hkv.dialects.rtp_llm.planning import dsv4
from hkv.dialects.rtp_llm.planning.budget import blocks_for_budget
from hkv.dialects.rtp_llm.planning.drafts import ATTENTION, draft_module
from hkv.dialects.rtp_llm.planning.elements import element_of
from hkv.dialects.rtp_llm.planning.opaque import OpaqueContext, opaque
from hkv.dialects.rtp_llm.planning.pools import (
    PoolGroup,
    PoolPlan,
    budget_shares,
    finalize,
    hybrid_tags,
    independent_pools,
    shared_pool,
)
from hkv.dialects.rtp_llm.planning.sizes import BlockBytes, indexer_scale_bytes, mha, mla
from hkv.errors import PlanError
from hkv.limits import MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole
from hkv.model.draft_modules import DEFAULT_TAG
from hkv.model.group_policy import GroupPolicy, GroupType, default_policy
from hkv.model.huggingface import Model
from hkv.spec import AttentionSpec, LayerSpec
from hkv.spec.dtypes import item_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpOptions:
    """Settings with which RTP-LLM serves a model.

    Attributes:
      block_size: tokens per block.
      kernel_block_size: tokens per kernel block, 0 for the block's own.
      pools: `shared` or `independent`.
      step: blocks between two kept states.
      drafts: draft tokens of a cycle.
      modules: copies of the draft, one for each of its steps (MTP) or one in all (EAGLE).
      pinned: fixed pools lie in pinned host memory.
      ranks: ranks of a prefill server among which a sequence's blocks are dealt out (RTP-LLM `kv_cache_sharded`, its
        tensor-parallel ranks, which then do not split heads).
    """

    block_size: int = 64
    kernel_block_size: int = 0
    pools: str = "shared"
    step: int = 1
    drafts: int = 0
    modules: int = 1
    pinned: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        check_whole("block_size", self.block_size, 1, MAX_TOKENS, PlanError)
        check_whole("kernel_block_size", self.kernel_block_size, 0, MAX_TOKENS, PlanError)
        check_whole("step", self.step, 0, MAX_TOKENS, PlanError)
        check_whole("ranks", self.ranks, 1, MAX_RANKS, PlanError)
        for name, least in (("modules", 1), ("drafts", 0)):
            check_whole(name, getattr(self, name), least, MAX_SPECULATIVE_TOKENS, PlanError)
        if self.pools not in ("shared", "independent"):
            raise PlanError("pools", self.pools, "shared or independent")


def plan_rtp_llm(model: Model, memory: int, options: RtpOptions, draft: Model | None = None) -> PoolPlan:
    """RTP-LLM's plan for a model read from its config.

    A draft's blocks cost as many bytes again for each module, and have the ids of the target's.

    Args:
      model: the model, read with the block size of `options`.
      memory: bytes for the cache.
      options: pools, kernel blocks, step, draft modules.
      draft: one draft module's own model, read with the same block size, or None.

    Raises:
      PlanError: RTP-LLM has no group for a layer, no group takes the draft's, or not one block fits.
    """
    groups, shared = _pools(model, options)
    shares = budget_shares(groups, shared=shared)
    drafted = ()
    if draft is not None:
        drafted = _draft_groups(draft, options, shared)
        per_module = budget_shares(drafted, shared=shared)
        shares = tuple(mine + options.modules * more for mine, more in zip(shares, per_module, strict=True))
    reserve, paged, swa = shares
    count = blocks_for_budget(memory, reserve=reserve, paged=paged, swa=swa, step=options.step)
    if count < 2:
        raise PlanError("memory", memory, f"at least {reserve + 2 * (paged + swa)} bytes: block 0 is reserved")
    groups = finalize(groups, count, shared=shared, step=options.step)
    modules = ()
    if drafted:
        modules = tuple(draft_module(groups, drafted, m, model.num_layers) for m in range(options.modules))
    return PoolPlan(tuple(groups), shared, count, paged, swa, reserve, memory, modules, options.ranks)


def _pools(model: Model, options: RtpOptions) -> tuple[tuple[PoolGroup, ...], bool]:
    """The groups, and whether they share a pool."""
    if model.model_type != "deepseek_v4":
        return _groups(model, options)
    if options.pools == "shared":
        raise PlanError("pools", "shared", "independent for deepseek_v4, whose groups differ in size")
    return _dsv4_groups(model, options), False


def _draft_groups(draft: Model, options: RtpOptions, shared: bool) -> tuple[PoolGroup, ...]:
    """A draft's own groups; one of attention alone has the tag `default`, whatever the pools."""
    if not draft.specs:
        raise PlanError("draft", draft.model_type, "a draft that caches something")
    groups, _ = _pools(draft, options)
    if not shared and len(groups) == 1 and groups[0].block.kind in ATTENTION:
        return (dataclasses.replace(groups[0], tag=DEFAULT_TAG),)
    return groups


def _groups(model: Model, options: RtpOptions) -> tuple[tuple[PoolGroup, ...], bool]:
    layers = _one_cache_each(model)
    kinds = [_group_type(spec) for spec, _ in layers]
    if options.ranks > 1 and GroupType.SWA in kinds:
        expected = "1 with windows that no description sizes for all ranks: their blocks hold one rank's tokens"
        raise PlanError("context-parallel ranks", options.ranks, expected)
    blocks = [_block(model, spec, indexer is not None, options) for spec, indexer in layers]
    kernel = options.kernel_block_size
    if options.pools == "independent":
        names = {GroupType.FULL: "full", GroupType.LINEAR: "linear", GroupType.SWA: "swa"}
        tags = _distinct([names[kind] for kind in kinds], blocks)
        policies = dict(zip(tags, map(default_policy, kinds), strict=True))
        by_tag = dict(zip(tags, blocks, strict=True))
        return independent_pools([(tag,) for tag in tags], by_tag, policies, kernel=kernel), False
    tags = ("default",) * len(kinds) if set(kinds) == {GroupType.FULL} else hybrid_tags(kinds)
    by_tag: dict[str, BlockBytes] = {}
    policies: dict[str, GroupPolicy] = {}
    for tag, block, kind in zip(tags, blocks, kinds, strict=True):
        if by_tag.setdefault(tag, block) != block:
            raise PlanError("pools", "shared", f"independent, as the layers of group {tag} differ in size")
        policies[tag] = default_policy(kind)
    return shared_pool(tags, by_tag, policies, kernel=kernel), True


def _distinct(names: Sequence[str], blocks: Sequence[BlockBytes]) -> list[str]:
    """A tag for each layer: its type's name, numbered where blocks of that type differ."""
    sizes: dict[str, list[BlockBytes]] = {}
    for name, block in zip(names, blocks, strict=True):
        if block not in sizes.setdefault(name, []):
            sizes[name].append(block)
    return [
        name if len(sizes[name]) == 1 else f"{name}{sizes[name].index(block)}"
        for name, block in zip(names, blocks, strict=True)
    ]


def _one_cache_each(model: Model) -> list[tuple[LayerSpec, LayerSpec | None]]:
    """Each layer's cache and, beside a latent one, its indexer."""
    layers: dict[int, list[LayerSpec]] = {}
    for layer in model.layers:
        if layer.spec is not None:
            layers.setdefault(layer.index, []).append(layer.spec)
    result = []
    for index, specs in layers.items():
        first, *rest = specs
        indexers = [spec for spec in rest if getattr(spec, "cache_role", None) == "indexer"]
        if len(rest) != len(indexers):
            raise PlanError(f"layers.{index}", len(specs), "one cache, and an indexer at most, under RTP-LLM")
        result.append((first, indexers[0] if indexers else None))
    return result


def _group_type(spec: LayerSpec) -> GroupType:
    if spec.snapshot:
        return GroupType.LINEAR
    return GroupType.SWA if spec.slides else GroupType.FULL


def _block(model: Model, spec: LayerSpec, indexed: bool, options: RtpOptions) -> BlockBytes:
    size = options.block_size
    if spec.snapshot:
        first, *rest = (math.prod(shape) * item_bytes(dtype) for shape, dtype in spec.state_tensors)
        total = spec.unpadded_page_size_bytes
        return BlockBytes(
            kind="linear", seq_size=size, k_elems=first, v_elems=sum(rest), elems=total, bytes=total, payload=total
        )
    if not isinstance(spec, AttentionSpec):
        raise PlanError("spec", spec, "attention or a recurrent state")
    if spec.latent:
        assert model.latent_sizes is not None
        lora, rope = model.latent_sizes
        block = mla(lora=lora, rope=rope, block_size=size, dtype=element_of(spec))
        if not indexed:
            return block
        assert model.indexer_size is not None
        return dataclasses.replace(block, scale=indexer_scale_bytes(model.indexer_size, size))
    if spec.value_size != spec.head_size:
        raise PlanError("head_size_v", spec.value_size, f"{spec.head_size}: keys and values of one size under RTP-LLM")
    return mha(heads=spec.num_kv_heads, head_dim=spec.head_size, block_size=size, dtype=element_of(spec))


def _dsv4_groups(model: Model, options: RtpOptions) -> tuple[PoolGroup, ...]:
    vector = next(spec for name, spec in model.specs.items() if name.endswith(".window"))
    assert isinstance(vector, AttentionSpec)
    assert vector.slides
    float8 = vector.dtype == "uint8"
    descs = dsv4.descriptions(head_dim=vector.head_size, indexer_dim=model.indexer_size or 1, float8=float8)
    size = 256 if options.block_size == 64 else options.block_size
    kernel = options.kernel_block_size or size
    if kernel % 128:
        raise PlanError("kernel_block_size", kernel, "a multiple of 128 tokens for compressed caches")
    context = OpaqueContext(
        seq_size=size,
        kernel_tokens=kernel,
        drafts=options.drafts,
        ranks=options.ranks,
        prefill=options.ranks > 1,
    )
    blocks = {tag: opaque(desc, context) for tag, desc in descs.items()}
    policies = {tag: dsv4.policy(tag, pinned=options.pinned) for tag in descs}
    ratios: dict[int, int] = {}
    for layer in model.layers:
        compressed = layer.name.endswith(".compressed")
        tokens = getattr(layer.spec, "tokens_per_state", 1) if compressed else 1
        ratios[layer.index] = max(ratios.get(layer.index, 1), tokens)
    tags = [dsv4.layer_tags(ratios[index]) for index in sorted(ratios)]
    return independent_pools(tags, blocks, policies, kernel=kernel)

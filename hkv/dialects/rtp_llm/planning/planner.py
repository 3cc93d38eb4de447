"""The plan that RTP-LLM makes of a model: its groups, its pools, its blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from hkv.dialects.rtp_llm.planning.blocks import block_of, blocks_for_budget
from hkv.dialects.rtp_llm.planning.descriptions import (
    ATTENTION,
    ORDINARY_BLOCK,
    DescribedModel,
    describe_model,
    draft_module,
)
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.pools import (
    PoolGroup,
    PoolPlan,
    budget_shares,
    finalize,
    independent_pools,
    shared_pool,
)
from hkv.dialects.rtp_llm.planning.sizes import indexer_scale_bytes
from hkv.errors import PlanError
from hkv.limits import MAX_BLOCKS, check_whole
from hkv.model.group_policy import (
    CacheDescription,
    GroupPolicy,
    GroupType,
    LayerDescription,
    MemoryPlacement,
    group_type_of,
)
from hkv.model.huggingface import Model


def plan_rtp_llm(model: Model, memory: int, options: RtpOptions, draft: Model | None = None) -> PoolPlan:
    """RTP-LLM's plan for a model read from its config."""
    if draft is not None and not draft.specs:
        raise PlanError("draft", draft.model_type, "a draft that caches something")
    described = describe_model(model, options)
    module = None if draft is None else describe_model(draft, options, draft=True)
    return plan_described(described, options, memory=memory, draft=module)


def served_options(model: Model, options: RtpOptions, given: Collection[str]) -> tuple[RtpOptions, list[str]]:
    """Options with which the model can be served, where those that nobody gave cannot.

    Pools are a pool a group for models whose groups one pool cannot hold; blocks of the default size become as many
    times longer as full attention needs to have the bytes of a state in one pool.
    """
    notes: list[str] = []
    kinds = {group_type_of(layer.spec) for layer in model.layers if layer.spec is not None}
    apart = model.model_type == "deepseek_v4" or not kinds <= {GroupType.FULL, GroupType.LINEAR}
    if apart and "pools" not in given:
        options = dataclasses.replace(options, pools="independent")
        notes.append("pools: one a group, as one pool holds full attention and recurrent states alone")
    if "block_size" in given or options.pools == "independent" or GroupType.LINEAR not in kinds:
        return options, notes
    described = describe_model(model, options)
    blocks = {
        tag: block_of(cache.spec, options, described.latent_sizes)
        for tag, cache in _caches(described.layers, options).items()
    }
    state = max((block.bytes for block in blocks.values() if block.kind == "linear"), default=0)
    full = min((block.bytes for block in blocks.values() if block.kind != "linear"), default=state)
    if full < state:
        options = dataclasses.replace(options, block_size=-(-state // full) * options.block_size)
        size = f"the smallest multiple of {ORDINARY_BLOCK} in which full attention has the {state:,} bytes of a state"
        notes.append(f"block size: {options.block_size}, {size}")
    return options, notes


def plan_described(
    model: DescribedModel,
    options: RtpOptions,
    *,
    memory: int | None = None,
    num_blocks: int | None = None,
    draft: DescribedModel | None = None,
) -> PoolPlan:
    """RTP-LLM's plan for layers that somebody described, in a memory or for a number of blocks, block 0 included.

    A draft's blocks cost as many bytes again for each module, and have the ids of the target's.
    """
    shared = options.pools == "shared"
    groups = _groups(model, options)
    shares = budget_shares(groups, shared=shared)
    drafted: tuple[PoolGroup, ...] = ()
    if draft is not None:
        drafted = _groups(draft, options)
        per_module = budget_shares(drafted, shared=shared, draft=True)
        shares = tuple(mine + options.modules * more for mine, more in zip(shares, per_module, strict=True))
    count, memory = _count(shares, memory, num_blocks, options.step)
    reserve, paged, swa = shares
    groups = finalize(groups, count, shared=shared, step=options.step)
    modules = ()
    if drafted:
        layers = len(model.layers)
        modules = tuple(draft_module(groups, drafted, module, layers) for module in range(options.modules))
    described = ((model, groups), *((draft, module) for module in modules))
    unindexed = tuple(
        layer
        for part, own in described
        for group in own
        if part is not None and part.indexer_size is not None and group.block.kind == "mla" and not group.scale_stride
        for layer in group.layers
    )
    ranks = (options.ranks, options.prefill_ranks)
    return PoolPlan(tuple(groups), shared, count, paged, swa, reserve, memory, modules, *ranks, unindexed)


def _count(shares: Sequence[int], memory: int | None, num_blocks: int | None, step: int) -> tuple[int, int]:
    """Blocks of the paged pools, and the bytes that they are bought with."""
    reserve, paged, swa = shares
    if (memory is None) == (num_blocks is None):
        raise PlanError("memory", memory, "bytes for the cache, or num_blocks in their stead")
    if num_blocks is not None:
        check_whole("num_blocks", num_blocks, 2, MAX_BLOCKS, PlanError)
        return num_blocks, reserve + num_blocks * paged + -(-num_blocks // max(1, step)) * swa
    assert memory is not None
    count = blocks_for_budget(memory, reserve=reserve, paged=paged, swa=swa, step=step)
    if count < 2:
        raise PlanError("memory", memory, f"at least {reserve + 2 * (paged + swa)} bytes: block 0 is reserved")
    return count, memory


def _groups(model: DescribedModel, options: RtpOptions) -> tuple[PoolGroup, ...]:
    caches = _caches(model.layers, options)
    blocks = {tag: block_of(cache.spec, options, model.latent_sizes) for tag, cache in caches.items()}
    if model.indexer_size is not None and options.pools == "shared" and len(blocks) == 1:
        ((tag, block),) = blocks.items()  # no spec has the bytes: RTP-LLM `SingleConfigCreator` alone adds them
        blocks[tag] = dataclasses.replace(block, scale=indexer_scale_bytes(model.indexer_size, block.seq_size))
    policies = {tag: _policy(cache, options) for tag, cache in caches.items()}
    if unknown := [tag for tag, _ in options.explicit_blocks if tag not in caches]:
        raise PlanError("explicit_blocks", unknown, f"tags of groups: {', '.join(caches)}")
    cached = next((block.dtype for block in blocks.values() if block.kind in ATTENTION), None)
    if cached is not None:  # a recurrent state's block counts in elements of the cache: attention's, or the model's own
        states = {tag: block for tag, block in blocks.items() if block.kind == "linear"}
        blocks |= {tag: dataclasses.replace(block, dtype=cached) for tag, block in states.items()}
    tags = [tuple(cache.tag for cache in layer.caches) for layer in model.layers]
    kernel = options.kernel_block_size
    if options.pools == "independent":
        return independent_pools(tags, blocks, policies, kernel=kernel)
    return shared_pool([each[0] for each in tags], blocks, policies, kernel=kernel)


def _caches(layers: Sequence[LayerDescription], options: RtpOptions) -> dict[str, CacheDescription]:
    """The description of each group, in the order in which layers first name them."""
    if not layers:
        raise PlanError("layers", layers, "at least one layer")
    found: dict[str, CacheDescription] = {}
    for index, layer in enumerate(layers):
        if not layer.caches:
            raise PlanError(f"layers.{index}", None, "a layer with a cache of its own, under RTP-LLM")
        if options.pools == "shared" and len(layer.caches) > 1:
            tags = [cache.tag for cache in layer.caches]
            raise PlanError(f"layers.{index}", tags, "one cache a layer in a shared pool")
        for cache in layer.caches:
            _check_block_size(cache, options)
            first = found.setdefault(cache.tag, cache)
            if (cache.spec, cache.policy) != (first.spec, first.policy):
                what = "size" if cache.spec != first.spec else "policy"
                expected = f"a tag for each {what}, as the layers of group {cache.tag} differ in it"
                raise PlanError("pools", options.pools, expected)
    return found


def _check_block_size(cache: CacheDescription, options: RtpOptions) -> None:
    """Makes sure that a description is for the server's blocks; of independent pools, 64 stands for not being set."""
    unset = options.pools == "independent" and options.block_size == ORDINARY_BLOCK
    if cache.spec.block_size != options.block_size and not unset:
        raise PlanError(f"block_size of {cache.tag}", cache.spec.block_size, f"{options.block_size}, the server's")


def _policy(cache: CacheDescription, options: RtpOptions) -> GroupPolicy:
    """The group's policy, with the number of blocks that was asked for."""
    wanted = dict(options.explicit_blocks).get(cache.tag)
    if wanted is None:
        return cache.policy
    on_device = cache.policy.memory_placement is MemoryPlacement.DEVICE
    return dataclasses.replace(cache.policy, explicit_block_num=wanted, charge_to_paged_budget=on_device)

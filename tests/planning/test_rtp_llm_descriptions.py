"""Layers that somebody describes, and a server's settings, on the way to RTP-LLM's pools."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from hkv.dialects.rtp_llm.planned_cache import PlannedCache, config_of_plan
from hkv.dialects.rtp_llm.planning import (
    DescribedModel,
    PoolPlan,
    RtpOptions,
    describe_model,
    plan_described,
    plan_rtp_llm,
    served_options,
)
from hkv.dialects.rtp_llm.planning.descriptions import dsv4_descriptions
from hkv.errors import PlanError, SpecError
from hkv.model.group_policy import CacheDescription, GroupType, LayerDescription, MemoryPlacement
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model
from hkv.model.released import released_models
from hkv.spec import FullAttention, Mamba, MLAAttention

MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"


def model(name: str, block_size: int = 64, draft: bool = False, **changes: Any) -> Model:
    fields = json.loads((MODELS / f"{name}.json").read_text()) | changes
    return read_model(fields, ReadOptions(block_size=block_size, draft=draft))


def of_tag(plan: PoolPlan) -> dict[str, Any]:
    return {group.tag: group for group in plan.groups}


def layer(tag: str, spec: Any, **policy: Any) -> LayerDescription:
    return LayerDescription(caches=(CacheDescription(tag=tag, spec=spec, **policy),))


@pytest.mark.parametrize(("heads", "ranks", "local"), [(12, 8, 3), (12, 4, 3), (12, 5, 12), (8, 2, 4), (4, 8, 1)])
def test_heads_are_split_by_rtp_llms_own_rule(heads: int, ranks: int, local: int) -> None:
    described = model("llama", num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads * 128)
    group = plan_rtp_llm(described, 20 << 30, RtpOptions(tensor_parallel=ranks)).groups[0]
    assert (group.block.local_heads, group.stride) == (local, 2 * local * 128 * 64 * 2)
    assert group.block.spec == FullAttention(block_size=64, num_kv_heads=local, head_size=128)


def test_a_model_that_another_rule_has_split_is_refused() -> None:
    split = read_model(load_config(MODELS / "llama.json"), ReadOptions(tensor_parallel=2))
    with pytest.raises(PlanError, match="by its own rule"):
        plan_rtp_llm(split, 20 << 30, RtpOptions(tensor_parallel=2))


def test_states_are_split_by_heads() -> None:
    """Qwen3-Next at 8 ranks: 2 key heads, 4 value heads of 128 each, a convolution of 4."""
    plan = plan_rtp_llm(model("qwen3_next", 1024), 60 << 30, RtpOptions(block_size=1024, tensor_parallel=8))
    block = of_tag(plan)["linear0"].block
    assert (block.k_elems, block.v_elems) == (4 * 128 * 128, 3 * (2 * 128 * 2 + 4 * 128))
    assert block.spec == Mamba(block_size=1024, shapes=((4, 128, 128), (3, 1024)), dtypes=("bfloat16", "bfloat16")), (
        "the state lies before the convolution's"
    )
    with pytest.raises(SpecError, match="key_heads"):
        plan_rtp_llm(model("qwen3_next", 1024), 60 << 30, RtpOptions(block_size=1024, tensor_parallel=32))


@pytest.mark.parametrize("name", ["jamba", "granitemoehybrid", "nemotron_h"])
def test_states_that_rtp_llm_cannot_size_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="RTP-LLM sizes no other"):
        plan_rtp_llm(model(name, 1024), 60 << 30, RtpOptions(block_size=1024))


def test_a_description_becomes_the_plan_of_the_config_that_says_the_same() -> None:
    config = model("qwen3_next", 1024)
    options = RtpOptions(block_size=1024)
    full = FullAttention(block_size=1024, num_kv_heads=2, head_size=256)
    state = Mamba(block_size=1024, shapes=((3, 8192), (32, 128, 128)), dtypes=("bfloat16", "bfloat16"))
    layers, seen = [], 0
    for index in range(48):
        if index % 4 == 3:
            layers.append(layer("full", full))
        else:
            layers.append(layer(f"linear{seen // 12}", state))
            seen += 1
    written = plan_described(DescribedModel(tuple(layers)), options, memory=60 << 30)
    assert written == plan_rtp_llm(config, 60 << 30, options)
    (cache,) = describe_model(config, options).layers[3].caches
    assert (cache.tag, cache.spec.page_size_bytes) == ("full", full.page_size_bytes)


def test_pools_of_blocks_that_were_asked_for() -> None:
    described = DescribedModel((layer("default", FullAttention(block_size=8, num_kv_heads=2, head_size=4)),))
    plan = plan_described(described, RtpOptions(block_size=8), num_blocks=7)
    assert (plan.num_blocks, plan.memory) == (7, 7 * 2 * 2 * 8 * 4 * 2)
    for refused in ({}, {"memory": 1 << 20, "num_blocks": 7}):
        with pytest.raises(PlanError, match="in their stead"):
            plan_described(described, RtpOptions(block_size=8), **refused)


def test_explicit_pools_are_paid_from_the_memory_unless_pinned() -> None:
    v4 = model("deepseek_v4", 256)
    options = {"block_size": 256, "pools": "independent"}
    plain = plan_rtp_llm(v4, 60 << 30, RtpOptions(**options))
    fixed = plan_rtp_llm(v4, 60 << 30, RtpOptions(**options, explicit_blocks=(("hca_state", 50), ("csa_state", 70))))
    assert (of_tag(fixed)["hca_state"].num_blocks, of_tag(fixed)["csa_state"].num_blocks) == (50, 70)
    assert fixed.reserve_bytes == 50 * 23 * 524288 + 70 * 20 * 65536
    assert plain.reserve_bytes == 256 * 23 * 524288
    pinned = plan_rtp_llm(v4, 60 << 30, RtpOptions(**options, pinned=True))
    assert pinned.reserve_bytes == 0
    assert of_tag(pinned)["swa_kv"].policy.memory_placement is MemoryPlacement.HOST_PINNED
    with pytest.raises(PlanError, match="tags of groups: hca_kv"):
        plan_rtp_llm(v4, 60 << 30, RtpOptions(**options, explicit_blocks=(("other", 50),)))
    with pytest.raises(PlanError, match="no pools of fixed size"):
        plan_rtp_llm(model("llama"), 60 << 30, RtpOptions(pinned=True))


def test_a_decode_server_holds_the_rings_of_all_prefill_ranks() -> None:
    """Its blocks stand for as many tokens as prefill's, of which each rank stores a part."""
    v4 = model("deepseek_v4", 256)
    options = {"block_size": 256, "pools": "independent"}
    prefill = of_tag(plan_rtp_llm(v4, 60 << 30, RtpOptions(**options, ranks=8)))
    decode = of_tag(plan_rtp_llm(v4, 60 << 30, RtpOptions(**options, role="decode", prefill_ranks=8)))
    for tag in ("swa_kv", "hca_state", "csa_state", "indexer_state"):
        assert decode[tag].block.seq_size == prefill[tag].block.seq_size == 8 * 256
        assert decode[tag].stride == 8 * prefill[tag].stride
    for tag in ("csa_kv", "hca_kv", "indexer_kv"):
        assert decode[tag].block == prefill[tag].block


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"role": "encode"}, "one of both, prefill, decode"),
        ({"ranks": 2, "tensor_parallel": 2}, "either split heads or deal blocks out"),
        ({"ranks": 2, "role": "decode"}, "prefill where blocks are dealt out"),
        ({"prefill_ranks": 2}, "1 unless the role is decode"),
        ({"explicit_blocks": (("full", 7),)}, "none in a shared pool"),
        ({"explicit_blocks": (("full", 7), ("full", 8)), "pools": "independent"}, "each group once"),
    ],
)
def test_settings_that_do_not_go_together(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        RtpOptions(**fields)


def test_descriptions_that_do_not_fit_together() -> None:
    full = FullAttention(block_size=8, num_kv_heads=2, head_size=4)
    other = FullAttention(block_size=8, num_kv_heads=3, head_size=4)
    latent = MLAAttention(block_size=8, head_size=20)
    cases: list[tuple[tuple[LayerDescription, ...], str]] = [
        ((), "at least one layer"),
        ((LayerDescription(),), "a cache of its own"),
        ((layer("a", full), layer("a", other)), "a tag for each size"),
        ((layer("a", full), layer("a", full, active_tail_blocks=1)), "a tag for each policy"),
        ((layer("a", latent),), "elements of a latent and of its rotary key, 20 together"),
        ((LayerDescription(caches=layer("a", full).caches + layer("b", full).caches),), "one cache a layer"),
        ((layer("a", full), layer("b", full)), "exactly one group of full attention"),
    ]
    for layers, says in cases:
        with pytest.raises(PlanError, match=says):
            plan_described(DescribedModel(layers), RtpOptions(block_size=8), num_blocks=7)
    plan_described(DescribedModel((layer("a", latent),), (16, 4)), RtpOptions(block_size=8), num_blocks=7)
    with pytest.raises(PlanError, match="block_size of a = 8: expected 16, the server's"):
        plan_described(DescribedModel((layer("a", full),)), RtpOptions(block_size=16), num_blocks=7)
    plan_described(DescribedModel((layer("a", full),)), RtpOptions(pools="independent"), num_blocks=7)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "deepseek_v32", "qwen3_next", "gemma3_text", "deepseek_v4"])
def test_the_layer_of_a_plan_is_the_layer_of_its_cache(name: str) -> None:
    """Nothing is described twice: the configuration's layers are the descriptions', as a rank has them."""
    size = {"qwen3_next": 1024, "deepseek_v4": 256}.get(name, 64)
    pools = "independent" if name in ("gemma3_text", "deepseek_v4") else "shared"
    plan = plan_rtp_llm(model(name, size), 60 << 30, RtpOptions(block_size=size, pools=pools))
    for group, planned in zip(config_of_plan(plan).topology.groups, plan.groups, strict=True):
        assert group.spec.page_size_bytes == planned.block.bytes * (
            planned.kernel_blocks if planned.block.entries else 1
        )
        assert group.spec.block_size == planned.block.seq_size
        assert getattr(group.spec, "head_size", None) == getattr(planned.block.spec, "head_size", None)


# Every released model with nothing but a size: planned, or refused for what RTP-LLM has no size for.


UNSIZED = (
    "states = .* RTP-LLM sizes no other",
    "layers.* one cache, and an indexer at most",
    "indexers = .* one for every layer or none",
    "head_size_v = .* keys and values of one size",
    "groups = .* no pools of windows alone",
)


@pytest.mark.parametrize("name", [released.name for released in released_models()])
def test_a_released_model_is_planned_or_has_no_size(name):
    """5 of those with gated delta nets were refused for float32 states, and others for blocks of 64 tokens."""
    model, refused = read_model(load_config(name)), ""
    try:
        options, _ = served_options(model, RtpOptions(), ())
        cache = PlannedCache.of_model(model, options, memory=80 << 30)
    except PlanError as error:
        refused = str(error)
    if refused:
        assert any(re.search(reason, refused) for reason in UNSIZED)
        return
    states = [group for group in cache.plan.groups if group.block.kind == "linear"]
    assert {group.block.spec.state_tensors[0][1] for group in states} <= {"bfloat16"}
    if states and cache.plan.shared:
        fewer = RtpOptions(block_size=max(1, options.block_size - 64))
        if options.block_size > 64:
            with pytest.raises(PlanError, match="not padded"):
                PlannedCache.of_model(model, fewer, memory=80 << 30)


@pytest.mark.parametrize("fixed", [False, True])
def test_windows_and_rings_alone_have_no_pools_apart(fixed: bool) -> None:
    """Nor beside full attention in a pool of fixed size: no block is paged (RTP-LLM `setupIndependentPoolSizes`)."""
    rings = dsv4_descriptions(head_dim=8, indexer_dim=4, float8=False)
    window = layer("swa", FullAttention(block_size=256, num_kv_heads=1, head_size=4), group_type=GroupType.SWA)
    alone = [window, LayerDescription(caches=(rings["csa_state"],)), LayerDescription(caches=(rings["swa_kv"],))]
    if fixed:
        full = FullAttention(block_size=256, num_kv_heads=1, head_size=4)
        alone.append(layer("full", full, explicit_block_num=5, charge_to_paged_budget=True))
    options = RtpOptions(pools="independent", block_size=256)
    for layers in ([each] for each in alone):
        with pytest.raises(PlanError, match=r"groups = .* no pools of windows alone"):
            plan_described(DescribedModel(tuple(layers)), options, num_blocks=7)
    state = Mamba(block_size=256, shapes=((2, 12), (2, 2, 2)), dtypes=("bfloat16", "bfloat16"))
    for paged in (layer("linear", state), LayerDescription(caches=(rings["csa_kv"],))):
        plan_described(DescribedModel((*alone, paged)), options, num_blocks=7)
    target = DescribedModel((*alone, LayerDescription(caches=(rings["csa_kv"],))))
    drafted = DescribedModel((LayerDescription(caches=(rings["swa_kv"],)),))
    assert plan_described(target, options, num_blocks=7, draft=drafted).modules
    with pytest.raises(PlanError, match="no pools of windows alone"):
        plan_described(target, options, num_blocks=7, draft=DescribedModel((window,)))


def test_states_beside_opaque_regions_have_the_models_element_type() -> None:
    """Nothing opaque says what the cache's elements are: attention does, else the model's own type."""
    state = Mamba(block_size=256, shapes=((2, 12), (2, 2, 2)), dtypes=("float16", "bfloat16"))
    described = dsv4_descriptions(head_dim=8, indexer_dim=4, float8=False)
    opaque = LayerDescription(caches=(described["csa_kv"],))
    window = FullAttention(block_size=256, num_kv_heads=1, head_size=4, dtype="float8_e4m3fn")
    options = RtpOptions(pools="independent", block_size=256)
    for others, dtype in (((), "float16"), ((layer("swa", window, group_type=GroupType.SWA),), "float8_e4m3fn")):
        plan = plan_described(DescribedModel((opaque, layer("linear", state), *others)), options, num_blocks=7)
        assert [group.block.dtype for group in plan.groups if group.block.kind == "linear"] == [dtype]


# The indexer's keys of a sparse model: no spec has their bytes, so one sole group has room for them, and no draft.


def sparse(*tags: str) -> DescribedModel:
    latent = MLAAttention(block_size=8, head_size=8)
    return DescribedModel(tuple(layer(tag, latent) for tag in tags), (6, 2), 4)


def test_a_draft_has_no_room_for_an_indexers_keys() -> None:
    """RTP-LLM counts their bytes when it buys blocks; its draft's region lacks them, and what follows moves up."""
    cache = PlannedCache.of_layers(
        sparse(*["default"] * 3), RtpOptions(block_size=8), num_blocks=2, draft=sparse("default")
    )
    latents, keys = 3 * 2 * 8 * 8 * 2, 3 * 2 * 8 * 4
    assert cache.pool_sizes == (latents + keys + 2 * 8 * 8 * 2,) == (1216,)
    assert cache.addresses.address(2, 1) == (5 * 128, latents + 5 * 32)
    assert cache.addresses.address(3, 1) == (latents + keys + 128, None)
    assert cache.layer_cache(3).scale is None
    assert (cache.plan.bytes_per_block, cache.plan.unindexed) == (4 * (128 + 32), (3,))
    modules = PlannedCache.of_layers(
        sparse("default"), RtpOptions(block_size=8, modules=3), num_blocks=2, draft=sparse("default")
    )
    assert [modules.addresses.address(layer, 0) for layer in range(4)] == [
        (0, 256),
        (320, None),
        (576, None),
        (832, None),
    ]


def test_several_groups_have_no_room_for_an_indexers_keys() -> None:
    apart = plan_described(sparse("full"), RtpOptions(block_size=8, pools="independent"), num_blocks=2)
    assert [(group.scale_stride, group.block.scale) for group in apart.groups] == [(0, 0)]
    state = Mamba(block_size=8, shapes=((2, 12), (2, 2, 2)), dtypes=("bfloat16", "bfloat16"))
    mixed = dataclasses.replace(sparse("full"), layers=(*sparse("full").layers, layer("linear0", state)))
    shared = plan_described(mixed, RtpOptions(block_size=8), num_blocks=2)
    assert [group.scale_stride for group in shared.groups] == [0, 0]
    assert apart.unindexed == shared.unindexed == (0,)
    assert plan_described(sparse("default"), RtpOptions(block_size=8), num_blocks=2).unindexed == ()
    with pytest.raises(PlanError, match="one group of the target's with the same blocks"):
        plan_described(mixed, RtpOptions(block_size=8), num_blocks=2, draft=sparse("default"))


# Draft modules: whose groups they join, how their layers are numbered, what they cost.


GIB = 1 << 30


def layers_of(plan: PoolPlan) -> list[dict[str, list[int]]]:
    return [{group.tag: list(group.layers) for group in module} for module in plan.modules]


def test_modules_of_a_plain_model_cost_their_layers() -> None:
    draft = model("llama", draft=True, num_hidden_layers=1)
    alone = plan_rtp_llm(model("llama"), GIB * 20, RtpOptions())
    assert alone.modules == ()
    plan = plan_rtp_llm(model("llama"), GIB * 20, RtpOptions(modules=3), draft)
    assert plan.bytes_per_block * 32 == alone.bytes_per_block * 35
    assert plan.num_blocks == GIB * 20 // plan.bytes_per_block
    assert layers_of(plan) == [{"default": [32]}, {"default": [33]}, {"default": [34]}]
    assert plan.groups[0].layers == tuple(range(32))
    assert {group.num_blocks for module in plan.modules for group in module} == {plan.num_blocks}


def test_h23_a_sole_default_group_joins_the_hybrids_full_group() -> None:
    """The groups of a module are the target's; those of recurrent states stay empty."""
    full = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    draft = model("qwen3_next", 1024, draft=True, **full)
    options = RtpOptions(block_size=1024, modules=2)
    plan = plan_rtp_llm(model("qwen3_next", 1024), GIB * 20, options, draft)
    empty: dict[str, list[int]] = {f"linear{index}": [] for index in range(3)}
    assert layers_of(plan) == [{"full": [48, 49]} | empty, {"full": [50, 51]} | empty]
    (group,) = [group for group in plan.modules[0] if group.layers]
    assert group.stride == plan.groups[0].stride == 1024 * 2 * 2 * 256 * 2
    assert plan.bytes_per_block == (12 + 2 * 2) * group.stride


def test_a_draft_of_typed_pools_joins_by_tag() -> None:
    draft = model("deepseek_v4", 256, draft=True, num_hidden_layers=1, layer_types=["sliding_attention"])
    options = RtpOptions(block_size=256, pools="independent", drafts=2, modules=2)
    alone = plan_rtp_llm(model("deepseek_v4", 256), GIB * 40, options)
    plan = plan_rtp_llm(model("deepseek_v4", 256), GIB * 40, options, draft)
    assert [{tag: ids for tag, ids in module.items() if ids} for module in layers_of(plan)] == [
        {"swa_kv": [43]},
        {"swa_kv": [44]},
    ]
    window = next(group for group in alone.groups if group.tag == "swa_kv")
    assert plan.tail_bytes_per_block == alone.tail_bytes_per_block + 2 * window.stride
    assert (plan.bytes_per_block, plan.reserve_bytes) == (alone.bytes_per_block, alone.reserve_bytes)


def refused(target: str, options: RtpOptions, draft: str, kinds: list[str] | None, says: str) -> None:
    changes = {"num_hidden_layers": len(kinds or "1")} | ({} if kinds is None else {"layer_types": kinds})
    module = model(draft, options.block_size, draft=True, **changes)
    with pytest.raises(PlanError, match=says):
        plan_rtp_llm(model(target, options.block_size), GIB * 40, options, module)


def test_h25_other_heads() -> None:
    refused("qwen3_next", RtpOptions(block_size=1024), "llama", None, "the same blocks and policy, among full, lin")


def test_a_draft_of_states_has_no_default_group() -> None:
    kinds = ["linear_attention", "full_attention"]
    refused("llama", RtpOptions(block_size=1024), "qwen3_next", kinds, "a group of the target's: default")


@pytest.mark.parametrize(
    ("kinds", "says"), [([], "43, as places in the group"), (["sliding_attention"], "all 2 of the draft")]
)
def test_groups_of_a_draft_have_all_its_layers_and_places_in_the_pool(kinds: list[str], says: str) -> None:
    options = RtpOptions(block_size=256, pools="independent")
    refused("deepseek_v4", options, "deepseek_v4", [*kinds, "heavily_compressed_attention"], says)


def test_no_module_is_no_number_of_modules() -> None:
    with pytest.raises(PlanError, match="from 1 to"):
        RtpOptions(modules=0)

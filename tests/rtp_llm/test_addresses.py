"""RTP-LLM's conformance vectors for addresses and copies; sizes and budgets are planning's tests."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from hkv.dialects.rtp_llm.addresses import Addresses, ByteSpan
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, PoolPlan, RtpOptions, plan_rtp_llm
from hkv.dialects.rtp_llm.planning.descriptions import CSA_TAGS, dsv4_descriptions, dsv4_layer_tags
from hkv.dialects.rtp_llm.planning.pools import budget_shares, finalize, independent_pools, shared_pool
from hkv.dialects.rtp_llm.planning.sizes import (
    OpaqueRegion,
    indexer_scale_bytes,
    linear,
    mha,
    mla,
    opaque,
)
from hkv.errors import LayoutError
from hkv.model.group_policy import CacheDescription, GroupType, LayerDescription, default_policy
from hkv.model.huggingface import ReadOptions, read_model
from hkv.spec import FullAttention

MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"

FULL, LINEAR, SWA = GroupType.FULL, GroupType.LINEAR, GroupType.SWA


def plan(groups, num_blocks: int, shared: bool) -> Addresses:
    sized = finalize(groups, num_blocks, shared=shared)
    return Addresses(PoolPlan(tuple(sized), shared, num_blocks, *budget_shares(groups, shared=shared), 0))


def region_of(description: CacheDescription) -> OpaqueRegion:
    assert isinstance(description.spec, OpaqueRegion)
    return description.spec


def hybrid() -> Addresses:
    """Layers LLLFLLLF under the tags of its groups."""
    tags = ["l0", "l0", "l1", "f", "l1", "l2", "l2", "f"]
    blocks = dict.fromkeys(tags, linear(key_heads=1, value_heads=1, head_dim=8, conv_kernel=2, block_size=4))
    blocks["f"] = mha(heads=2, head_dim=64, block_size=4, dtype="int8")
    policies = {tag: default_policy(FULL if tag == "f" else LINEAR) for tag in tags}
    return plan(shared_pool(tags, blocks, policies), 4, True)


def single(scale: int = 0, block: str = "mha") -> Addresses:
    sized = mha(heads=4, head_dim=8, block_size=4, dtype="bfloat16")
    if block == "mla":
        sized = mla(lora=16, rope=8, block_size=4, dtype="bfloat16")
    sized = dataclasses.replace(sized, scale=scale)
    return plan(shared_pool(["default"] * 3, {"default": sized}, {"default": default_policy(FULL)}), 4, True)


def test_layers_come_before_blocks() -> None:
    addresses = single()
    stride = addresses.plan.groups[0].stride
    assert addresses.address(1, 2) == (6 * stride, None)
    assert addresses.address(0, 0) == (0, None)
    for layer, block in ((3, 0), (0, 4), (0, -1), (-1, 0)):
        with pytest.raises(LayoutError):
            addresses.address(layer, block)


def test_sparse_models_copy_indexer_bytes() -> None:
    scale = indexer_scale_bytes(256, 4)
    assert scale == 1056
    addresses = single(scale, "mla")
    group = addresses.plan.groups[0]
    memory = np.zeros(addresses.pool_sizes()[0], np.uint8)
    scales = {layer: addresses.address(layer, 0)[1] for layer in range(3)}
    random = np.random.default_rng(0)
    for layer, start in scales.items():
        assert start is not None
        memory[start : start + scale] = random.integers(0, 256, scale)
        kv = addresses.address(layer, 0)[0]
        memory[kv : kv + group.stride] = random.integers(0, 256, group.stride)
    for source, target in ((0, 1), (1, 3)):
        for old, new in addresses.copies(source, target):
            assert old.size == new.size
            memory[new.offset : new.offset + new.size] = memory[old.offset : old.offset + old.size]
    for layer in range(3):
        for kind, size in ((0, group.stride), (1, scale)):
            at = [addresses.address(layer, block)[kind] for block in (0, 3, 2)]
            first, copied, untouched = (memory[start : start + size] for start in at if start is not None)
            assert np.array_equal(first, copied)
            assert not untouched.any()


def test_layers_of_different_groups_share_places() -> None:
    addresses = hybrid()
    assert [(group.tag, group.layers) for group in addresses.plan.groups] == [
        ("f", (3, 7)),
        ("l0", (0, 1)),
        ("l1", (2, 4)),
        ("l2", (5, 6)),
    ]
    assert addresses.address(3, 1) == addresses.address(0, 1) == addresses.address(2, 1, "l1")
    assert addresses.address(7, 1) == addresses.address(6, 1)
    with pytest.raises(LayoutError, match="one of layer 3's: f"):
        addresses.address(3, 1, "l0")


def test_by_tag_a_state_is_as_long_as_it_is() -> None:
    addresses = hybrid()
    full = addresses.plan.groups[0]
    (state,) = addresses.buffers(0, 2, "l0")
    assert state.size == addresses.plan.groups[1].block.bytes < full.stride
    assert [span.size for span in addresses.buffers(0, 2)] == [full.stride, full.scale_stride]
    assert [span.size for span in addresses.buffers(3, 2, "f")] == [full.stride, full.scale_stride]
    assert addresses.parts(3, 2, 2, 1) == addresses.buffers(3, 2)


def test_shares_of_heads_cover_a_block() -> None:
    sized = mha(heads=4, head_dim=8, block_size=4, dtype="int8")
    addresses = plan(shared_pool(["default"], {"default": sized}, {"default": default_policy(FULL)}), 3, True)
    shares = [span for index in range(4) for span in addresses.parts(0, 1, 4, index)]
    whole = addresses.buffers(0, 1)
    assert len(shares) == 16
    covered = sorted(byte for span in shares for byte in range(span.offset, span.offset + span.size))
    assert covered == sorted(byte for span in whole for byte in range(span.offset, span.offset + span.size))
    with pytest.raises(LayoutError):
        addresses.parts(0, 1, 3, 0)


def test_deepseek_v4_addresses_by_tag() -> None:
    descs = dsv4_descriptions(head_dim=512, indexer_dim=128, float8=True)
    blocks = {tag: opaque(region_of(desc), RtpOptions(kernel_block_size=128)) for tag, desc in descs.items()}
    layers = [dsv4_layer_tags(ratio) for ratio in (0, 4, 128, 4)]
    groups = independent_pools(layers, blocks, {tag: desc.policy for tag, desc in descs.items()}, kernel=128)
    addresses = plan(groups, 9, False)
    spans = [addresses.buffers(1, 5, tag) for tag in CSA_TAGS]
    assert len({span.pool for (span,) in spans}) == 5
    (compressed,) = addresses.buffers(3, 2, "csa_kv")
    assert compressed == ByteSpan(1, (1 * 9 + 2) * 2 * 19008, 2 * 19008)
    with pytest.raises(LayoutError, match="one of layer 1's"):
        addresses.address(1, 5)
    with pytest.raises(LayoutError, match="one of layer 2's"):
        addresses.address(2, 5, "csa_kv")
    copied = list(addresses.copies(1, 2, "csa_kv"))
    assert len(copied) == 2
    with pytest.raises(LayoutError, match="one of layer"):
        list(addresses.copies(1, 2))
    with pytest.raises(LayoutError, match="one of"):
        list(addresses.copies(1, 2, "nothing"))


@pytest.mark.parametrize(
    ("name", "pools", "block_size"),
    [("deepseek_v3", "shared", 64), ("qwen3_next", "shared", 1024), ("deepseek_v4", "independent", 256)],
)
def test_draft_layers_have_addresses_behind_the_targets(name: str, pools: str, block_size: int) -> None:
    """Every block of every listed layer is somewhere in its pool, and no two of one id share a byte."""
    fields = json.loads((MODELS / f"{name}.json").read_text())
    kinds = {"qwen3_next": "full_attention", "deepseek_v4": "sliding_attention"}
    draft = fields | {"num_hidden_layers": 1} | ({"layer_types": [kinds[name]]} if name in kinds else {})
    target = read_model(fields, ReadOptions(block_size=block_size))
    module = read_model(draft, ReadOptions(block_size=block_size, draft=True))
    options = RtpOptions(block_size=block_size, pools=pools, modules=2)
    planned = plan_rtp_llm(target, 60 << 30, options, module)
    groups = finalize(planned.groups, 3, shared=planned.shared)
    modules = [finalize(module, 3, shared=planned.shared) for module in planned.modules]
    small = dataclasses.replace(planned, groups=groups, modules=tuple(modules), num_blocks=3)
    addresses = Addresses(small)
    taken: dict[tuple[int, int], set[str]] = {}
    for group in (group for groups in (small.groups, *small.modules) for group in groups):
        for layer in group.layers:
            for block in range(group.num_blocks):
                for span in addresses.buffers(layer, block, group.tag):
                    assert 0 <= span.offset < span.offset + span.size <= addresses.pool_sizes()[span.pool]
                    tags = taken.setdefault((span.pool, span.offset), set())
                    assert group.tag not in tags, "two layers of one group share a block's bytes"
                    tags.add(group.tag)
    count = target.num_layers
    tags = {home.group.tag for home in addresses.homes(count) + addresses.homes(count + 1)}
    assert tags == {{"deepseek_v3": "default", "qwen3_next": "full", "deepseek_v4": "swa_kv"}[name]}
    (first,) = addresses.homes(count)
    assert first.region.kv_offset >= addresses.homes(0)[0].region.kv_offset
    copied = {new.offset for _, new in addresses.copies(1, 2, first.group.tag)}
    assert addresses.address(count, 2)[0] in copied, "a fork copies the draft's block too"


def test_scales_of_drafts_come_behind_all_blocks_of_a_groups_own_pool() -> None:
    """RTP-LLM `createConfigForGroup` makes one layout of a group's layers, draft modules' among them."""
    spec = FullAttention(block_size=8, num_kv_heads=1, head_size=2, dtype="float8_e4m3fn")
    one = LayerDescription(caches=(CacheDescription(tag="full", spec=spec),))
    model, draft = DescribedModel((one, one)), DescribedModel((one,))
    apart = PlannedCache.of_layers(model, RtpOptions(pools="independent", block_size=8), num_blocks=3, draft=draft)
    blocks, scales = 3 * 3 * 32, 3 * 3 * 64
    assert apart.pool_sizes == (blocks + scales,)
    assert [apart.addresses.address(layer, 1) for layer in range(3)] == [
        (32, blocks + 64),
        (4 * 32, blocks + 4 * 64),
        (7 * 32, blocks + 7 * 64),
    ]
    assert apart.pools()[0][blocks:].view("float32").tolist() == [1.0] * (scales // 4)
    shared = PlannedCache.of_layers(model, RtpOptions(block_size=8), num_blocks=3, draft=draft)
    assert shared.addresses.address(2, 1) == (6 * 32 + 6 * 64 + 32, 9 * 32 + 6 * 64 + 64)

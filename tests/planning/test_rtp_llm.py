"""RTP-LLM's sizes, pools and budgets: vectors that its own tests or formulas fix."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.planning import RtpOptions, blocks_for_budget, plan_rtp_llm
from hkv.dialects.rtp_llm.planning.descriptions import CSA_TAGS, dsv4_descriptions, dsv4_layer_tags
from hkv.dialects.rtp_llm.planning.pools import (
    budget_shares,
    finalize,
    group_layer_count,
    hybrid_tags,
    independent_pools,
    kernel_blocks,
    shared_pool,
)
from hkv.dialects.rtp_llm.planning.sizes import (
    OpaqueRegion,
    indexer_scale_bytes,
    linear,
    mha,
    mla,
    opaque,
)
from hkv.errors import PlanError, SpecError
from hkv.model.group_policy import GroupType, MemoryPlacement, default_policy
from hkv.model.huggingface import ReadOptions, load_config, read_model

MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
FULL, LINEAR, SWA = GroupType.FULL, GroupType.LINEAR, GroupType.SWA


def test_k2_k3_latent_blocks() -> None:
    block = mla(lora=512, rope=64, block_size=16, dtype="bfloat16")
    assert (block.k_elems, block.v_elems, block.elems, block.bytes) == (8192, 1024, 9216, 18432)
    float8 = mla(lora=512, rope=64, block_size=1, dtype="float8_e4m3fn")
    assert (float8.elems, float8.bytes, float8.k_elems + float8.v_elems) == (656, 656, 576)


def test_scales_of_one_byte_elements() -> None:
    block = mha(heads=4, head_dim=64, block_size=16, dtype="int8", tensor_parallel=2)
    assert (block.bytes, block.scale) == (2 * 2 * 64 * 16, 2 * 4 * 2 * 16)
    assert indexer_scale_bytes(256, 4) == 1056


def test_k4_linear_states() -> None:
    block = linear(key_heads=16, value_heads=16, head_dim=128, conv_kernel=4, block_size=64, tensor_parallel=8)
    assert (block.k_elems, block.v_elems) == (32768, 2304)


@pytest.mark.parametrize(("keys", "values", "ranks"), [(6, 8, 4), (8, 4, 4), (4, 6, 2)])
def test_k6_linear_heads_that_do_not_fit(keys: int, values: int, ranks: int) -> None:
    with pytest.raises(SpecError):
        linear(key_heads=keys, value_heads=values, head_dim=128, conv_kernel=4, block_size=1, tensor_parallel=ranks)


def test_k7_compressed_block_of_a_prefill_rank() -> None:
    desc = OpaqueRegion(
        block_size=128, state=False, entry_elems=16, entry_dtype="uint8", count="compressed", ratio=4, cp_scale_seq=True
    )
    block = opaque(desc, RtpOptions(kernel_block_size=128, ranks=2))
    assert (block.entries, block.seq_size) == (32, 256)


def test_k8_ring_of_a_prefill_and_of_a_decode_rank() -> None:
    desc = OpaqueRegion(
        block_size=128,
        state=True,
        entry_elems=32,
        entry_dtype="float32",
        count="ring",
        ratio=4,
        overlap=1,
        alignment=64,
        cp_align_payload=True,
        cp_scale_seq=True,
        cp_slice="payload",
    )
    prefill = opaque(desc, RtpOptions(kernel_block_size=128, drafts=3, ranks=2))
    decode = opaque(desc, RtpOptions(kernel_block_size=128, drafts=3, role="decode", prefill_ranks=2))
    assert (prefill.entries, prefill.bytes, prefill.seq_size) == (6, 768, 256)
    assert (decode.entries, decode.seq_size) == (12, 256)


CONTEXT = RtpOptions(kernel_block_size=128)


def test_k9_deepseek_v4_in_bfloat16() -> None:
    descs = dsv4_descriptions(head_dim=512, indexer_dim=128, float8=False, block_size=128)
    sizes = {tag: opaque(desc.spec, CONTEXT).payload for tag, desc in descs.items()}
    assert sizes == {
        "csa_kv": 32768,
        "hca_kv": 1024,
        "indexer_kv": 8192,
        "indexer_state": 16384,
        "csa_state": 65536,
        "hca_state": 524288,
        "swa_kv": 131072,
    }


def test_k10_deepseek_v4_in_float8() -> None:
    descs = dsv4_descriptions(head_dim=512, indexer_dim=128, float8=True, block_size=128)
    strides = {tag: opaque(descs[tag].spec, CONTEXT).bytes for tag in ("csa_kv", "hca_kv", "indexer_kv", "swa_kv")}
    assert strides == {"csa_kv": 19008, "hca_kv": 1152, "indexer_kv": 4224, "swa_kv": 74880}


@pytest.mark.parametrize(("entries", "payload", "stride"), [(64, 37376, 37440), (2, 1168, 1728), (132, 77088, 77184)])
def test_k11_alignment_of_packed_entries(entries: int, payload: int, stride: int) -> None:
    desc = OpaqueRegion(
        block_size=128,
        state=False,
        entry_elems=584,
        entry_dtype="uint8",
        count="explicit",
        explicit_entries=entries,
        alignment=576,
    )
    block = opaque(desc, CONTEXT)
    assert (block.payload, block.bytes) == (payload, stride)


def test_k15_order_and_layers_of_deepseek_v4s_groups() -> None:
    pro = [128, 128, *([4, 128] * 29), 4]
    flash = [0, 0, *([4, 128] * 20), 4]
    order = "hca_kv hca_state swa_kv csa_kv indexer_kv indexer_state csa_state"
    assert " ".join(dict.fromkeys(tag for ratio in pro for tag in dsv4_layer_tags(ratio))) == order
    order = "swa_kv csa_kv indexer_kv indexer_state csa_state hca_kv hca_state"
    assert " ".join(dict.fromkeys(tag for ratio in flash for tag in dsv4_layer_tags(ratio))) == order
    counts = {tag: sum(tag in dsv4_layer_tags(ratio) for ratio in pro) for tag in ("hca_kv", "csa_kv", "swa_kv")}
    assert counts == {"hca_kv": 31, "csa_kv": 30, "swa_kv": 61}
    counts = {tag: sum(tag in dsv4_layer_tags(ratio) for ratio in flash) for tag in ("hca_kv", "csa_kv", "swa_kv")}
    assert counts == {"hca_kv": 20, "csa_kv": 21, "swa_kv": 43}


def test_i15_explicit_pools() -> None:
    descs = dsv4_descriptions(head_dim=512, indexer_dim=128, float8=False, block_size=128)
    blocks = {tag: opaque(desc.spec, CONTEXT) for tag, desc in descs.items()}
    policies = {tag: desc.policy for tag, desc in descs.items()}
    policies["hca_state"] = dataclasses.replace(policies["hca_state"], explicit_block_num=50)
    layers = [dsv4_layer_tags(ratio) for ratio in (128, 128, 4, 128, 4)]
    groups = independent_pools(layers, blocks, policies, kernel=128)
    sized = {group.tag: group.num_blocks for group in finalize(groups, 200, shared=False)}
    assert sized == {tag: 50 if tag == "hca_state" else 200 for tag in sized}
    assert budget_shares(groups, shared=False)[0] == 50 * 3 * 524288
    in_host_memory = dsv4_descriptions(head_dim=512, indexer_dim=128, float8=False, block_size=128, pinned=True)
    pinned = {tag: desc.policy for tag, desc in in_host_memory.items()}
    assert pinned["hca_state"].memory_placement is MemoryPlacement.HOST_PINNED
    assert budget_shares(independent_pools(layers, blocks, pinned, kernel=128), shared=False)[0] == 0


@given(
    total=st.integers(0, 3000),
    reserve=st.integers(0, 50),
    paged=st.integers(0, 20),
    swa=st.integers(0, 60),
    step=st.integers(0, 7),
)
def test_blocks_of_a_budget_are_the_most_that_fit(total: int, reserve: int, paged: int, swa: int, step: int) -> None:
    def cost(count: int) -> int:
        return reserve + count * paged + -(-count // max(1, step)) * swa

    if paged + swa == 0:
        with pytest.raises(PlanError, match="bytes that a block costs"):
            blocks_for_budget(total, reserve=reserve, paged=paged, swa=swa, step=step)
        return
    count = blocks_for_budget(total, reserve=reserve, paged=paged, swa=swa, step=step)
    assert count == 0 or cost(count) <= total
    assert cost(count + 1) > total or total < reserve


@pytest.mark.parametrize(("linears", "fulls", "size"), [(30, 10, 10), (4, 6, 6), (3, 0, 3), (0, 3, 3)])
def test_k18_layers_of_a_group(linears: int, fulls: int, size: int) -> None:
    assert group_layer_count(linears, fulls) == size


def test_groups_of_a_shared_pool() -> None:
    tags = ["l0", "l0", "l1", "f", "l1", "l2", "l2", "f"]
    blocks = dict.fromkeys(tags, linear(key_heads=1, value_heads=1, head_dim=8, conv_kernel=2, block_size=4))
    blocks["f"] = mha(heads=1, head_dim=64, block_size=4, dtype="bfloat16")
    policies = {tag: default_policy(FULL if tag == "f" else LINEAR) for tag in tags}
    groups = shared_pool(tags, blocks, policies, kernel=2)
    assert [(group.tag, group.layers) for group in groups] == [
        ("f", (3, 7)),
        ("l0", (0, 1)),
        ("l1", (2, 4)),
        ("l2", (5, 6)),
    ]
    assert {group.stride for group in groups} == {blocks["f"].bytes}
    assert all(group.block.bytes < group.stride for group in groups[1:])
    assert [group.kernel_blocks for group in groups] == [2, 1, 1, 1]
    with pytest.raises(PlanError, match="not padded"):
        shared_pool(tags, blocks | {"f": mha(heads=1, head_dim=1, block_size=1, dtype="int8")}, policies)
    with pytest.raises(PlanError, match="exactly one group"):
        shared_pool(tags[:3], blocks, policies)


def test_tags_of_a_hybrid_model() -> None:
    kinds = [FULL if index % 4 == 3 else LINEAR for index in range(40)]
    tags = hybrid_tags(kinds)
    assert {tag: tags.count(tag) for tag in tags} == {"full": 10, "linear0": 10, "linear1": 10, "linear2": 10}
    assert hybrid_tags([LINEAR, LINEAR]) == ("linear", "linear")
    with pytest.raises(PlanError, match="independent"):
        hybrid_tags([FULL, SWA])


def test_kernel_blocks() -> None:
    assert [kernel_blocks(*each) for each in ((8, 2), (1, 0), (8, 0), (512, 64))] == [4, 1, 1, 8]
    with pytest.raises(PlanError, match="kernel_block_size"):
        kernel_blocks(8, 3)


def test_keys_and_values_are_not_counted_once_for_each_kernel_block() -> None:
    block = mha(heads=1, head_dim=8, block_size=8, dtype="bfloat16")
    with pytest.raises(PlanError, match="sized whole"):
        independent_pools([("full",)], {"full": block}, {"full": default_policy(FULL)}, kernel=4)


@pytest.mark.parametrize(
    ("name", "pools", "block_size", "groups"),
    [
        ("llama", "shared", 64, {"default": 32}),
        ("qwen3_next", "shared", 1024, {"full": 12, "linear0": 12, "linear1": 12, "linear2": 12}),
        ("gemma3_text", "independent", 64, {"swa": 22, "full": 4}),
        ("gemma4_text", "independent", 64, {"swa": 25, "full": 5}),
        ("deepseek_v32", "shared", 64, {"default": 61}),
        (
            "deepseek_v4",
            "independent",
            256,
            dict.fromkeys(("hca_kv", "hca_state"), 23) | {"swa_kv": 43} | dict.fromkeys(CSA_TAGS[:-1], 20),
        ),
    ],
)
def test_models(name: str, pools: str, block_size: int, groups: dict[str, int]) -> None:
    model = read_model(load_config(MODELS / f"{name}.json"), ReadOptions(block_size=block_size))
    plan = plan_rtp_llm(model, 20 << 30, RtpOptions(block_size=block_size, pools=pools))
    assert {group.tag: len(group.layers) for group in plan.groups} == groups
    used = plan.reserve_bytes + plan.num_blocks * (plan.bytes_per_block + plan.tail_bytes_per_block)
    assert used <= plan.memory < used + plan.bytes_per_block + plan.tail_bytes_per_block


@pytest.mark.parametrize(
    ("name", "memory", "says"),
    [
        ("qwen3_next", 20 << 30, "full attention is not padded"),
        ("llama", 1 << 20, "block 0 is reserved"),
        ("deepseek_v4", 20 << 30, "independent for deepseek_v4"),
    ],
)
def test_models_that_have_no_shared_pool_of_that_size(name: str, memory: int, says: str) -> None:
    model = read_model(load_config(MODELS / f"{name}.json"), ReadOptions(block_size=64))
    with pytest.raises(PlanError, match=says):
        plan_rtp_llm(model, memory, RtpOptions())


def test_a_float8_latent_keeps_its_scales_among_its_elements() -> None:
    model = read_model(load_config(MODELS / "deepseek_v32.json"), ReadOptions(kv_dtype="fp8", block_size=64))
    (group,) = plan_rtp_llm(model, 20 << 30, RtpOptions()).groups
    assert (group.stride, group.scale_stride) == (64 * 656, 64 * 132)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_ds_mla"])
def test_every_float8_latent_is_656_bytes(kv_dtype: str) -> None:
    model = read_model(load_config(MODELS / "deepseek_v3.json"), ReadOptions(kv_dtype=kv_dtype, block_size=64))
    plan = plan_rtp_llm(model, 80 << 30, RtpOptions())
    assert (plan.groups[0].stride, plan.num_blocks, plan.token_bytes) == (41984, 33541, 40016)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("deepseek_v3", "nvfp4_ds_mla"),
        ("deepseek_v3", "int4_per_token_head"),
        ("llama", "int4_per_token_head"),
        ("llama", "fp8_e5m2"),
        ("qwen3_next", "int8_per_token_head"),
        ("qwen3_next", "nvfp4"),
    ],
)
def test_packings_that_rtp_llm_does_not_have_are_refused(name: str, kv_dtype: str) -> None:
    model = read_model(load_config(MODELS / f"{name}.json"), ReadOptions(kv_dtype=kv_dtype, block_size=1024))
    with pytest.raises(PlanError, match="one of RTP-LLM's: auto, "):
        plan_rtp_llm(model, 80 << 30, RtpOptions(block_size=1024))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_padding_is_what_no_rank_fills(ranks: int) -> None:
    """A block that ranks share has its padding at its end, on the last rank."""
    model = read_model(load_config(MODELS / "deepseek_v4.json"), ReadOptions(block_size=256))
    plan = plan_rtp_llm(model, 80 << 30, RtpOptions(block_size=256, pools="independent", ranks=ranks))
    for group in plan.groups:
        assert 0 <= group.padding_bytes < 1024, group.tag
        if group.tag == "swa_kv":
            assert group.padding_bytes == group.stride * ranks - -(-128 // ranks) * ranks * 584

"""Cross attention: blocks of an encoder's output in plans, and the refusal wherever blocks are managed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.planning import Plan, PlanOptions, plan_vllm
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.residency import simulate
from hkv.errors import ConfigError, SpecError
from hkv.model.topology import Topology
from hkv.spec import KINDS, CrossAttention, FullAttention, LayerSpec, RequestLimits, spec_from_log, spec_from_text

CROSS = CrossAttention(block_size=16, num_kv_heads=2, head_size=64, encoder_len=100)
FULL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)


def planned(layers: dict[str, LayerSpec], step: int) -> Plan:
    limits = RequestLimits(max_model_len=448, max_in_flight_tokens=step, max_num_encoder_input_tokens=step)
    return plan_vllm([layers], [1 << 24], PlanOptions(limits=limits, layout="LBNHC", caching=False))


def test_an_encoders_tokens_are_reserved_for_a_whole_step_and_held_for_one_request() -> None:
    limits = RequestLimits(max_model_len=448, max_num_encoder_input_tokens=8192)
    assert CROSS.max_request_blocks(limits) == 512
    assert {CROSS.held_blocks(start, end, limits) for start, end in ((0, 1), (16, 300), (447, 448))} == {7}
    few = dataclasses.replace(limits, max_num_encoder_input_tokens=40)
    assert (CROSS.max_request_blocks(few), CROSS.held_blocks(0, 1, few)) == (3, 3)
    assert (CROSS.row_blocks(limits), CROSS.row_blocks(few)) == (512, 28)
    assert CROSS.bounded_bytes(1) == CROSS.bounded_bytes(448) == 100 * 2 * 2 * 64 * 2
    assert [CROSS.reads(n) for n in (0, 1, 447)] == [(), (), ()], "no token of the request itself"
    with pytest.raises(SpecError, match="encoder_len"):
        dataclasses.replace(CROSS, encoder_len=0)


@given(
    full=st.integers(1, 6),
    cross=st.integers(1, 6),
    encoder=st.integers(1, 400),
    step=st.integers(16, 400),
    blocks=st.integers(1, 600),
)
def test_requests_that_fit_hold_their_own_tokens_and_one_encoders_output(
    full: int, cross: int, encoder: int, step: int, blocks: int
) -> None:
    spec = dataclasses.replace(CROSS, encoder_len=encoder)
    layers: dict[str, LayerSpec] = {f"f{i}": FULL for i in range(full)}
    layers.update({f"c{i}": spec for i in range(cross)})
    plan = planned(layers, step)
    assert all(len(set(group.specs)) == 1 for group in plan.groups), "blocks of the two are never of one table"
    limits = RequestLimits(max_model_len=64, max_in_flight_tokens=step, max_num_encoder_input_tokens=step)
    kinds = [FULL if FULL in group.specs else spec for group in plan.groups]
    each = sum(-(-64 // 16) if kind is FULL else -(-min(encoder, step) // 16) for kind in kinds)
    assert simulate(plan.groups, blocks, limits, step_tokens=step).requests == blocks // each


@pytest.mark.parametrize(
    ("name", "ranks", "line"),
    [
        (
            "whisper-large-v3",
            1,
            "GPU KV cache size: 27,185 tokens, Maximum concurrency for 448 tokens per request: 60.68x",
        ),
        ("nemotron-parse-v1.1", 8, "8,381,158 tokens, Maximum concurrency for 9,000 tokens per request: 931.24x"),
        ("cohere-transcribe", 2, "582,542 tokens, Maximum concurrency for 1,024 tokens per request: 568.89x"),
        ("llama-3.2-90b-vision", 1, "209,712 tokens, Maximum concurrency for 131,072 tokens per request: 1.60x"),
    ],
)
def test_the_line_is_the_one_that_vllm_logs(name: str, ranks: int, line: str) -> None:
    made = plan_config(name, EngineOptions(kv_cache_memory_bytes=80 << 30, tensor_parallel_size=ranks))
    assert made.startup.line.endswith(line)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching = True"),
        ({"max_num_batched_tokens": 1499}, "max-num-batched-tokens = 1499: expected at least 1500"),
        ({"max_num_batched_tokens": 400, "max_num_seqs": 8}, "max-num-batched-tokens = 400: expected at least 448"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size = 2"),
        ({"tensor_parallel_size": 8}, "decoder_attention_heads = 20"),
        ({"kv_cache_dtype": "nvfp4", "device": "b200"}, "kv_dtype = 'nvfp4'"),
    ],
)
def test_options_that_an_encoder_rules_out_are_refused(options: dict[str, object], says: str) -> None:
    given_options = EngineOptions(kv_cache_memory_bytes=80 << 30, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        plan_config("whisper-large-v3", given_options)


def test_it_is_refused_by_name_where_blocks_are_managed() -> None:
    assert CROSS.kind not in KINDS
    with pytest.raises(SpecError, match="kind = 'cross_attention'"):
        spec_from_log({"kind": "cross_attention", "block_size": 16, "encoder_len": 100})
    with pytest.raises(SpecError, match="group = 'cross:16:100'"):
        spec_from_text("cross:16:100")
    with pytest.raises(ConfigError, match=r"groups\[1\].kind = 'cross_attention'"):
        VllmConfig(topology=Topology.of_specs([FULL, CROSS]), num_blocks=9, hash_block_size=16, scheduler_block_size=16)
    with pytest.raises(ConfigError, match=r"groups\[1\].kind = 'cross_attention'"):
        plan_config("whisper-large-v3", EngineOptions(kv_cache_memory_bytes=80 << 30)).config()

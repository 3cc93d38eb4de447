"""Cross attention and windows under bounded replay: plans, rows, logs, traffic, forks, and where they are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.cache.state import require_expressible
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Header
from hkv.dialects.vllm.planning import Plan, PlanOptions, plan_vllm
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.residency import simulate
from hkv.dialects.vllm.schedule.run import VllmReplayedCache
from hkv.errors import ConfigError, FileError, OperationError, SpecError
from hkv.model.topology import Topology
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.record import Only, differ, draw
from hkv.spec import (
    CrossAttention,
    FullAttention,
    LayerSpec,
    RequestLimits,
    bounded_bytes,
    spec_from_log,
    spec_from_text,
    spec_to_log,
)
from hkv.spec.sliding_window import ReplayedWindow
from tests.cache.pair import Pair as CachePair
from tests.oracle import sample
from tests.oracle.test_live_logs import VLLM, allocate, perform
from tests.reference.build import config as build

CROSS = CrossAttention(block_size=16, num_kv_heads=2, head_size=64, encoder_len=100)
FULL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)


def planned(layers: dict[str, LayerSpec], step: int) -> Plan:
    limits = RequestLimits(max_model_len=448, max_in_flight_tokens=step, max_num_encoder_input_tokens=step)
    return plan_vllm([layers], [1 << 24], PlanOptions(limits=limits, layout="LBNHC", caching=False))


def test_an_encoders_tokens_are_reserved_for_a_whole_step_and_held_for_one_request() -> None:
    limits = RequestLimits(max_model_len=448, max_num_encoder_input_tokens=8192)
    assert layer(CROSS).max_request_blocks(limits) == 512
    assert {layer(CROSS).held_blocks(start, end, limits) for start, end in ((0, 1), (16, 300), (447, 448))} == {7}
    few = dataclasses.replace(limits, max_num_encoder_input_tokens=40)
    assert (layer(CROSS).max_request_blocks(few), layer(CROSS).held_blocks(0, 1, few)) == (3, 3)
    assert (layer(CROSS).row_blocks(limits), layer(CROSS).row_blocks(few)) == (512, 28)
    assert bounded_bytes(CROSS, 1) == bounded_bytes(CROSS, 448) == 100 * 2 * 2 * 64 * 2
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
        ({"kv_cache_dtype": "nvfp4", "device": "b200"}, "kv_cache_dtype = 'nvfp4'"),
    ],
)
def test_options_that_an_encoder_rules_out_are_refused(options: dict[str, object], says: str) -> None:
    given_options = EngineOptions(kv_cache_memory_bytes=80 << 30, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        plan_config("whisper-large-v3", given_options)


ASKED = frozenset({"cross_attention", "full_attention", "sliding_window", "mamba", "opaque"})


def cache(num_blocks: int = 12, **changes: Any) -> Header:
    """A header of a full group in blocks of 2, and one of an encoder's output in blocks of 4."""
    groups = [
        {"kind": "full_attention", "block_size": 2},
        {"kind": "cross_attention", "block_size": 4, "encoder_len": 30},
    ]
    fixed = {"oplog": 3, "caching": False, "groups": groups, "num_blocks": num_blocks, "scheduler_block_size": 4}
    return sample.header(**(fixed | changes))


def test_more_than_the_encoders_tokens_are_refused() -> None:
    for make in (NumpyEngine, JaxEngine):
        engine = make(cache())
        perform(engine, oplog.RequestOp(id="a", tokens=[1]))
        with pytest.raises(OperationError, match="encoder = 31: expected at most encoder_len 30"):
            perform(engine, allocate("a", 1, encoder=31))
    lines = [{"op": "request", "id": "a", "tokens": [1]}, {**sample.ALLOCATE, "id": "a", "new": 1, "encoder": 31}]
    for header, said in (
        (cache(), "encoder = 31: expected at most encoder_len 30"),
        (sample.header(oplog=3), "encoder = 31: expected 0: no group reads them"),
    ):
        with pytest.raises(FileError, match=said):
            parse_log(log_of(header, lines), "log")


def log_of(header: Header, lines: list[dict[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *lines))


def test_it_is_refused_by_name_where_it_cannot_be() -> None:
    layers = [FULL, CROSS]
    with pytest.raises(ConfigError, match=r"caching = True: expected False beside groups\[1\]"):
        VllmConfig(topology=Topology.of_specs(layers), num_blocks=9, hash_block_size=16, scheduler_block_size=16)
    with pytest.raises(ConfigError, match="kind = 'cross_attention': expected version 3"):
        to_config(cache(oplog=2))
    config = to_config(cache())
    for refuses in (require_expressible, VllmReplayedCache):
        with pytest.raises(
            ConfigError, match=r"groups\[1\].kind = 'cross_attention': expected a kind of a request's own"
        ):
            refuses(config)


def test_it_is_drawn_without_caching_alone() -> None:
    drawn = [draw("core", seed, 3)[0] for seed in range(200)]
    having = [header for header in drawn if any(group["kind"] == "cross_attention" for group in header.groups)]
    assert having
    assert not any(header.caching for header in having)
    asked, _ = draw("external", 0, 3, Only(frozenset({"cross_attention"})))
    assert [group["kind"] for group in asked.groups] == ["cross_attention"]
    assert not any("cross_attention" in str(draw("core", seed, 2)[0].groups) for seed in range(60))


def traffic(engine: str = "numpy", seeds: int = 6) -> None:
    """An engine against the reference under random traffic, with every invariant where it is the reference."""
    granted = 0
    for seed in range(seeds):
        feature = ("core", "external")[seed % 2]
        drawn, choices = draw(feature, seed, 3, Only(ASKED))
        if engine == "numpy":
            VLLM.drive(drawn, choices, VLLM.watch(NumpyEngine(drawn), drawn).perform, 12)
        recording, parted = differ(engine_factory(engine), NumpyEngine, feature, seed, 3, 12, only=Only(ASKED))
        assert parted is None, parted
        log = parse_log(log_bytes(drawn, recording.operations, recording.answers), f"{feature} {seed}")
        granted += VLLM.exercised(log).get("allocate/encoder", 0)
    assert granted > seeds


@pytest.mark.parametrize("engine", ["numpy", "jax"])
def test_engines_agree_under_traffic(engine: str) -> None:
    traffic(engine)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_agrees_under_traffic() -> None:
    traffic("vllm", 24)


def test_a_fork_shares_an_encoders_output() -> None:
    pair = CachePair(build("full:2,cross:4:30", num_blocks=14, max_model_len=48, caching=False))
    pair.request("a", 9, range(24))
    assert pair.allocate("a", 9, encoder=4)
    pair.advance("a", 9)
    assert pair.fork("a", "b") == [[(5, 7)], []]
    assert pair.reference.manager.rows("b") == [[1, 2, 3, 4, 7], [6]]
    assert pair.reference.manager.pool.refs[6] == 2


REPLAYED_GROUPS = [
    {"kind": "full_attention", "block_size": 2},
    {"kind": "replayed_window", "block_size": 2, "window": 4},
]
REPLAYED = frozenset({"replayed_window", "full_attention", "sliding_window"})


def test_it_reads_a_window_and_is_never_cached() -> None:
    spec = spec_from_text("replayed:2:4")
    assert spec == ReplayedWindow(block_size=2, window=4) == spec_from_log(spec_to_log(spec))
    assert (spec.reads(9), layer(spec).retired(9, 2), spec.prefix_cacheable) == ((range(6, 9),), range(3), False)


def test_a_replayed_window_is_drawn_and_refused_by_name() -> None:
    drawn = [draw("core", seed, 3)[0] for seed in range(80)]
    assert any(group["kind"] == "replayed_window" for header in drawn for group in header.groups)
    assert not any("replayed_window" in str(draw("core", seed, 2)[0].groups) for seed in range(60))
    with pytest.raises(ConfigError, match="kind = 'replayed_window': expected version 3"):
        to_config(sample.header(oplog=2, groups=REPLAYED_GROUPS))
    config = to_config(sample.header(oplog=3, groups=REPLAYED_GROUPS))
    for refuses in (require_expressible, VllmReplayedCache):
        with pytest.raises(ConfigError, match=r"groups\[1\].kind = 'replayed_window': expected a kind that needs no"):
            refuses(config)


def replayed_traffic(engine: str = "numpy", seeds: int = 6) -> None:
    """An engine against the reference under random replayed_traffic, with every invariant where it is the reference."""
    having = 0
    for seed in range(seeds):
        feature = ("core", "eagle", "retention")[seed % 3]
        drawn, choices = draw(feature, seed, 3, Only(REPLAYED))
        having += any(group["kind"] == "replayed_window" for group in drawn.groups)
        if engine == "numpy":
            VLLM.drive(drawn, choices, VLLM.watch(NumpyEngine(drawn), drawn).perform, 12)
        _, parted = differ(engine_factory(engine), NumpyEngine, feature, seed, 3, 10, only=Only(REPLAYED))
        assert parted is None, parted
    assert 2 * having > seeds


@pytest.mark.parametrize("engine", ["numpy", "jax"])
def test_engines_agree_under_traffic_of_replayed_windows(engine: str) -> None:
    replayed_traffic(engine)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_agrees_under_traffic_of_replayed_windows() -> None:
    replayed_traffic("vllm", 24)

"""Grouping, pages, tensors and sizes as vLLM 0.33 plans them: recorded plans, an installed vLLM, and rules by hand."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.planning import Plan, PlanOptions, plan_vllm
from hkv.dialects.vllm.planning.pages import align_states, approximate_gcd, unify_pages
from hkv.dialects.vllm.planning.plan import options_of, options_record, plan_record
from hkv.dialects.vllm.planning.residency import request_blocks
from hkv.dialects.vllm.vectors import LayerSet, draw_layer_set
from hkv.errors import HKVError, PlanError
from hkv.layout.block_layout import Layout
from hkv.model.huggingface.family import words
from hkv.spec import FullAttention, HiddenState, LayerSpec, Mamba, MLAAttention, RequestLimits, SlidingWindow
from hkv.spec.written import spec_of, spec_record

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data" / "planning"
DEFECTS = words(
    """absent-layers-get-tensors latent-window-promotion packed-split-loses-layers scattered-heads-unaligned
    stale-page-padding window-latent-merge window-sizes-abort-grouping"""
)

FULL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)
WINDOW = SlidingWindow(block_size=16, num_kv_heads=2, head_size=64, window=40)
LATENT = MLAAttention(block_size=16, head_size=576)
LIMITS = RequestLimits(max_model_len=1000, max_in_flight_tokens=100)


def plan(layers: dict[str, LayerSpec] | list[dict[str, LayerSpec]], memory: int = 1 << 26, **options: object) -> Plan:
    workers = layers if isinstance(layers, list) else [layers]
    given_options = {"limits": LIMITS, "layout": "LBNHC"} | options
    return plan_vllm(workers, [memory] * len(workers), PlanOptions(**given_options))  # type: ignore[arg-type]


def layers(*counted: tuple[str, int, LayerSpec]) -> dict[str, LayerSpec]:
    return {f"{name}{i}": spec for name, count, spec in counted for i in range(count)}


def outcome(case: LayerSet, bugs: frozenset[str] = DEFECTS) -> dict:
    try:
        return plan_record(plan_vllm(case.workers, case.memory, dataclasses.replace(case.options, bugs=bugs)))
    except HKVError:
        return {"refused": True}


def recorded(name: str) -> list[dict]:
    with gzip.open(FOLDER / name, "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["random.jsonl.gz", "models.jsonl.gz"])
def test_plans_equal_those_recorded_from_vllm(name: str) -> None:
    for entry in recorded(name):
        workers = tuple({layer: spec_of(spec) for layer, spec in worker.items()} for worker in entry["workers"])
        case = LayerSet(workers, tuple(entry["memory"]), options_of(entry["options"]))
        assert outcome(case) == entry["vllm"], entry["name"]


@pytest.mark.vllm
def test_plans_equal_those_of_an_installed_vllm() -> None:
    from benchmarks.installed_planning import InstalledPlanner

    planner = InstalledPlanner()
    for seed in range(150):
        case = draw_layer_set(seed)
        theirs = planner.plan(case.workers, case.memory, case.options)
        assert outcome(case) == ({"refused": True} if "refused" in theirs else theirs), seed


@given(seed=st.integers(0, 1 << 32))
def test_records_keep_layers_and_options(seed: int) -> None:
    case = draw_layer_set(seed)
    for worker in case.workers:
        for spec in worker.values():
            back = spec_of(json.loads(json.dumps(spec_record(spec))))
            assert back == spec
            assert back.is_draft == spec.is_draft
    assert options_of(json.loads(json.dumps(options_record(case.options)))) == case.options


def test_every_worker_takes_the_fewest_blocks() -> None:
    workers = [{"a": FULL}, {"b": FULL, "c": FULL}]
    made = plan_vllm(workers, [1 << 22, 1 << 22], PlanOptions(limits=LIMITS, layout="LBNHC"))
    assert [worker.fitting_blocks for worker in made.workers] == [512, 256]
    assert (made.num_blocks, made.limited_by) == (256, 1)
    assert [worker.size for worker in made.workers] == [256 * 8192, 256 * 16384]


def test_a_worker_manages_a_mixed_group_by_the_first_of_its_own_layers() -> None:
    wider = dataclasses.replace(FULL, num_kv_heads=3 * FULL.num_kv_heads)
    made = plan_vllm([{"a": FULL}, {"b": wider}], [1 << 22] * 2, PlanOptions(limits=LIMITS, layout="BLHNC"))
    assert [group.mixed for group in made.groups] == [True]
    assert [worker.groups[0].spec for worker in made.workers] == [FULL, wider]
    assert made.groups[0].restricted(set()).spec == made.groups[0].spec == FULL


def test_small_pages_get_more_tokens_and_others_padding() -> None:
    state = Mamba(block_size=64, shapes=((100,),))
    narrow = dataclasses.replace(WINDOW, num_kv_heads=1)
    odd = dataclasses.replace(WINDOW, head_size=24)
    unified = unify_pages({"full": FULL, "narrow": narrow, "odd": odd, "state": state}, frozenset())
    assert {spec.page_size_bytes for spec in unified.values()} == {FULL.page_size_bytes}
    assert [spec.block_size for spec in unified.values()] == [16, 32, 16, 64]
    assert unify_pages(unified, frozenset()) == unified
    with pytest.raises(PlanError, match="latent pages are not padded"):
        unify_pages({"full": FULL, "latent": dataclasses.replace(LATENT, head_size=100)}, frozenset())


def test_padding_is_scaled_with_its_page_unless_the_defect_is_asked_for() -> None:
    padded = dataclasses.replace(WINDOW, num_kv_heads=1, head_size=32, page_size_padded=4096)
    given_layers = {"full": FULL, "padded": padded}
    unified = unify_pages(given_layers, frozenset())["padded"]
    assert (unified.block_size, unified.page_size_bytes) == (32, 8192)
    with pytest.raises(PlanError, match="old padding"):
        unify_pages(given_layers, frozenset({"stale-page-padding"}))


def test_attention_blocks_grow_to_hold_a_state() -> None:
    state = Mamba(block_size=16, shapes=((3, 8192), (32, 128, 128)), dtypes=("bfloat16", "bfloat16"))
    attention = FullAttention(block_size=16, num_kv_heads=2, head_size=256)
    both = {"state": state, "full": attention}
    aligned = align_states(both, kernel_block_size=16, mamba_mode="align", max_model_len=32768)
    assert [spec.block_size for spec in aligned.values()] == [544, 544]
    assert {spec.page_size_bytes for spec in aligned.values()} == {544 * 2048}
    alone = align_states({"full": attention}, kernel_block_size=16, mamba_mode="align", max_model_len=8)
    assert alone == {"full": attention}
    running = align_states(both, kernel_block_size=16, mamba_mode="none", max_model_len=32768)
    assert running["state"].block_size == 32768


def test_approximate_gcd_takes_the_larger_on_a_tie() -> None:
    assert approximate_gcd([20, 23]) == 1 or approximate_gcd([20, 23], 10) == 23
    assert approximate_gcd([6, 12]) == 6
    assert approximate_gcd([4], 9) == 9


def test_an_unbalanced_bucket_is_split_without_losing_layers() -> None:
    wide = dataclasses.replace(WINDOW, num_kv_heads=4)
    given_layers = layers(("full", 1, FULL), ("wide", 1, wide), ("narrow", 5, WINDOW))
    made = plan(given_layers, layout="BLHNC")
    assert sorted(name for group in made.groups for name in group.names) == sorted(given_layers)
    with pytest.raises(PlanError):
        plan(given_layers, layout="BLHNC", bugs=frozenset({"packed-split-loses-layers"}))


def test_promoted_layers_keep_every_token() -> None:
    made = plan(layers(("full", 2, FULL), ("swa", 3, WINDOW)), hybrid=False)
    (group,) = made.groups
    assert isinstance(group.spec, FullAttention)
    assert (group.spec.sliding_window, len(group.names)) == (40, 5)
    with pytest.raises(PlanError, match="cached like full attention"):
        plan({"full": dataclasses.replace(FULL, cp_sharded=True), "state": Mamba(block_size=16)}, hybrid=False)


def test_two_promoted_windows_share_a_mixed_group_unless_the_defect_is_asked_for() -> None:
    other = dataclasses.replace(WINDOW, window=80)
    given_layers = {"full": FULL, "a": WINDOW, "b": other}
    made = plan(given_layers, hybrid=False)
    assert [group.mixed for group in made.groups] == [True]
    with pytest.raises(PlanError, match="sliding_window"):
        plan(given_layers, hybrid=False, bugs=frozenset({"window-sizes-abort-grouping"}))


def test_latent_layers_beside_windows_that_fit_no_page_cache_everything() -> None:
    made = plan({"latent": dataclasses.replace(LATENT, head_size=100), "swa": WINDOW})
    assert len(made.groups) == 1
    assert made.groups[0].mixed


def test_an_order_that_scatters_heads_keeps_their_blocks_aligned_unless_the_defect_is_asked_for() -> None:
    aligned = dataclasses.replace(FULL, block_stride_alignment=8192)
    assert aligned.page_size_bytes == 8192
    with pytest.raises(PlanError, match="8192 bytes apart, not 4096"):
        plan({"full": aligned}, layout="LHBNC")
    defect = plan({"full": aligned}, layout="LHBNC", bugs=frozenset({"scattered-heads-unaligned"}))
    assert defect.workers[0].tensors[0].block_stride == 4096
    one_head = dataclasses.replace(aligned, num_kv_heads=1, head_size=128)
    assert plan({"full": one_head}, layout="LHBNC").workers[0].tensors[0].block_stride == 8192
    with pytest.raises(HKVError, match="aligned to 8192 bytes"):
        Layout.of_spec(aligned, "LHBNC", num_blocks=4)


def test_the_grid_of_states_grows_with_the_attention_blocks_beside_a_large_hidden_state() -> None:
    state, small = Mamba(block_size=64, shapes=((48,),)), dataclasses.replace(FULL, num_kv_heads=1, head_size=8)
    hidden = HiddenState(block_size=16, head_size=1024)
    made = plan({"state": state, "full": small, "hidden": hidden})
    assert [group.spec.block_size for group in made.groups] == [256, 64, 1]
    assert {group.spec.page_size_bytes for group in made.groups} == {2048}
    assert (made.scheduler_block_size, made.groups[0].spec.unpadded_page_size_bytes) == (256, 192)


def test_the_null_block_is_not_given_away() -> None:
    blocks = request_blocks(plan({"full": FULL}).groups, LIMITS)
    assert plan({"full": FULL}, memory=(blocks + 1) * 8192).num_blocks == blocks + 1
    with pytest.raises(PlanError, match=rf"at least {(blocks + 1) * 8192} bytes.*992 tokens would fit"):
        plan({"full": FULL}, memory=blocks * 8192)


def test_the_longest_request_that_fits() -> None:
    made = plan({"full": FULL}, memory=11 * 8192, auto_fit=True)
    assert (made.max_model_len, made.num_blocks) == (160, 11)
    with pytest.raises(PlanError, match="one token"):
        plan({"full": FULL}, memory=8192, auto_fit=True)


def test_draft_layers_flag_their_group() -> None:
    draft = dataclasses.replace(FULL, is_draft=True)
    made = plan({"full": FULL, "swa": WINDOW, "swa1": WINDOW, "draft": draft}, eagle=True)
    assert [(group.names, group.eagle) for group in made.groups] == [
        (("full", "draft"), True),
        (("swa", "swa1"), False),
    ]
    assert [group.eagle for group in made.topology_groups()] == [True, False]


def test_without_a_wish_the_first_order_that_fits_is_taken() -> None:
    assert plan({"a": FULL}, layout=None).layout == "LBNHC"
    assert plan({"a": FULL}, layout=None, supported_layouts=("BLHNC",)).layout == "BLHNC"
    latent = dataclasses.replace(LATENT, head_size=100)
    chosen = plan({"full": FULL, "latent": latent, "state": Mamba(block_size=16)}, layout=None)
    assert chosen.layout == "BLNHC"


def test_a_model_without_a_cache_has_the_null_block_alone() -> None:
    made = plan({})
    assert (made.num_blocks, made.groups, made.workers[0].tensors) == (1, (), ())


def test_workers_must_agree() -> None:
    with pytest.raises(PlanError, match="same on every worker"):
        plan([{"a": FULL}, {"a": WINDOW}])


@pytest.mark.parametrize(
    "options", [{"tensor_parallel": 0}, {"num_blocks": 0}, {"prefill_lookahead": -1}, {"bugs": {"no"}}]
)
def test_impossible_options_are_refused(options: dict) -> None:
    with pytest.raises(HKVError):
        plan({"a": FULL}, **options)

"""Plans against a dictionary of the ranks that have and need each byte."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.transfers import Peer, tensor_parallel_peers
from hkv.errors import PlanError
from hkv.mesh.parallel_shape import ParallelShape, Rank
from hkv.mesh.resharding import Plan, Side, plan_resharding
from hkv.spec import FullAttention, MLAAttention
from reference.resharding import execute, faults, fill, holdings
from tests.resharding.cases import Case, cases, content, side

SPEC = FullAttention(block_size=4, num_kv_heads=4, head_size=2)
LATENT = MLAAttention(block_size=4, head_size=4)


def plan_of(case: Case, **options: object) -> Plan:
    return plan_resharding(case.source, case.target, case.positions, **options)  # type: ignore[arg-type]


def ranks(chosen: Side) -> dict[tuple[int, int], np.ndarray]:
    return {tuple(rank): np.zeros(chosen.layout.end, np.uint8) for rank in chosen.shape.ranks}


@given(cases(), st.sampled_from(["forward", "direct"]))
@settings(max_examples=80)
def test_every_byte_that_is_needed_is_sent_once_and_nothing_else(case: Case, replicas: str) -> None:
    plan = plan_of(case, replicas=replicas)
    assert list(faults(plan, *case.states, direct=replicas == "direct")) == []


@given(cases())
@settings(max_examples=30)
def test_carried_out_it_gives_what_a_cold_target_holds(case: Case) -> None:
    source, target, cold = ranks(case.source), ranks(case.target), ranks(case.target)
    fill(source, holdings(case.source, *case.states, range(2)), content)
    fill(cold, holdings(case.target, *case.states, range(2)), content)
    execute(plan_of(case), source, target)
    for rank, pool in cold.items():
        assert target[rank].tobytes() == pool.tobytes()


def simple(source: ParallelShape, target: ParallelShape, spec=SPEC, tokens: int = 16) -> Case:
    return Case(
        side(spec, source, "LBNHC", [3, 1, 4, 2, 5], 4), side(spec, target, "LBHNC", [5, 2, 1, 4, 3], 4), range(tokens)
    )


def test_a_plan_with_a_defect_is_found_out() -> None:
    """Each kind of mistake is seen by the definition: lost, doubled, needless, from the wrong place, too early."""
    case = simple(ParallelShape(heads=4, tensor=2), ParallelShape(heads=4, tensor=4, context=2))
    plan = plan_of(case)
    assert list(faults(plan, *case.states)) == []
    first, rest = plan.sends[0], plan.sends[1:]
    shifted = dataclasses.replace(first.runs[0], source=first.runs[0].source + 1)
    for sends, fault in (
        (rest, "bytes are missing"),
        ((first, *plan.sends), "arrives twice"),
        ((dataclasses.replace(first, source_block=2), *rest), "is sent"),
        ((dataclasses.replace(first, runs=(shifted, *first.runs[1:])), *rest), "is sent"),
        ((dataclasses.replace(first, target=Rank(0, 1)), *rest), "is sent"),
    ):
        found = list(faults(dataclasses.replace(plan, sends=sends), *case.states))
        assert any(fault in each for each in found), (fault, found[:3])
    needless = plan_resharding(case.source, case.target, range(20))
    assert any("not needed" in fault for fault in faults(needless, *case.states))
    shared = simple(ParallelShape(heads=4), ParallelShape(heads=4, tensor=8))
    forwarding = plan_of(shared)
    early = dataclasses.replace(forwarding, sends=forwarding.sends[1:])
    assert any("before it is there" in fault for fault in faults(early, *shared.states))


def pairs(prefill: int, decode: int, heads: int) -> set[tuple[int, int, range]]:
    spec = dataclasses.replace(SPEC, num_kv_heads=heads)
    plan = plan_of(simple(ParallelShape(heads=heads, tensor=prefill), ParallelShape(heads=heads, tensor=decode), spec))
    return {(move.source.tensor, move.target.tensor, move.heads) for move in plan.sends}


def test_j13_asymmetric_tensor_parallelism() -> None:
    """P4 -> D2, rank 3 fills the second half of server 1; P2 -> D4, rank 1 sends its halves to servers 2 and 3."""
    assert {pair for pair in pairs(4, 2, 4) if pair[0] == 3} == {(3, 1, range(3, 4))}
    assert {pair for pair in pairs(2, 4, 4) if pair[0] == 1} == {(1, 2, range(2, 3)), (1, 3, range(3, 4))}


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 6), (6, 3), (4, 4), (6, 2)])
def test_divisible_degrees_pair_as_rtp_llm_pairs_them(prefill: int, decode: int) -> None:
    heads = 12
    expected = set()
    for rank in range(prefill):
        for peer in tensor_parallel_peers(prefill, decode, rank):
            assert isinstance(peer, Peer)
            own, theirs = heads // prefill, heads // decode
            first = rank * own + peer.local[1] * own // peer.local[0]
            assert first == peer.server * theirs + peer.remote[1] * theirs // peer.remote[0]
            expected.add((rank, peer.server, range(first, first + min(own, theirs))))
    assert pairs(prefill, decode, heads) == expected


def test_degrees_that_do_not_divide_are_planned_where_rtp_llm_has_no_peers() -> None:
    assert tensor_parallel_peers(3, 2, 0) == []
    assert pairs(3, 2, 6) == {(0, 0, range(0, 2)), (1, 0, range(2, 3)), (1, 1, range(3, 4)), (2, 1, range(4, 6))}


def test_a_hit_on_the_target_and_a_window_are_left_out() -> None:
    case = simple(ParallelShape(heads=4), ParallelShape(heads=4, tensor=2))
    plan = plan_resharding(case.source, case.target, range(6, 16), layers=range(1, 2))
    assert plan.sent_bytes == 10 * 4 * 2 * 2 * 2
    assert min(run.state for move in plan.sends for run in move.runs) == 6
    assert plan_resharding(case.source, case.target, range(6, 6)).sends == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, t: (s, t, range(-1, 4)), r"positions = range\(-1, 4\): expected consecutive positions, 0 or more"),
        (lambda s, t: (s, t, range(0, 4, 2)), "positions = "),
        (lambda s, t: (s, t, range(99)), "source.row = -1: expected a block in column 5, which holds state 20"),
        (
            lambda s, t: (s, dataclasses.replace(t, row=(5, 0)), range(8)),
            "target.row = 0: expected a block in column 1",
        ),
        (
            lambda s, t: (s, dataclasses.replace(t, row=(5, -1)), range(8)),
            "target.row = -1: expected a block in column",
        ),
        (lambda s, t: (s, latent(t), range(8)), "target.shape.heads = 1: expected 4, as on the source"),
        (lambda s, t: (s, wider(t), range(8)), "target.layout.content = .*expected .*as on the source"),
    ],
)
def test_impossible_plans_are_refused(change, message: str) -> None:
    case = simple(ParallelShape(heads=4), ParallelShape(heads=4, tensor=2))
    with pytest.raises(PlanError, match=message):
        plan_resharding(*change(case.source, case.target))


def latent(chosen: Side) -> Side:
    return side(LATENT, ParallelShape(heads=1), "LBNHC", chosen.row, 4)


def wider(chosen: Side) -> Side:
    return side(dataclasses.replace(SPEC, head_size=3), chosen.shape, "LBNHC", chosen.row, 4)


def test_other_refusals() -> None:
    case = simple(ParallelShape(heads=4), ParallelShape(heads=4, tensor=2))
    for layers in (range(1, 3), range(0), range(0, 2, 2)):
        with pytest.raises(PlanError, match=r"layers = .*expected consecutive layers, at least one, of 2"):
            plan_of(case, layers=layers)
    with pytest.raises(PlanError, match="replicas = 'some': expected forward or direct"):
        plan_of(case, replicas="some")
    with pytest.raises(PlanError, match="row = 6: expected block ids below 6"):
        dataclasses.replace(case.source, row=(6,))
    with pytest.raises(PlanError, match=r"row = \(3, 3\): expected each block once"):
        dataclasses.replace(case.source, row=(3, 3))
    plan = plan_of(case)
    with pytest.raises(PlanError, match="layer = 2: expected one of range"):
        plan.byte_runs(plan.sends[0], 2)

"""Exploring under RTP-LLM's rules: every state there is, the shortest way to a defect, one line for what makes no
sense."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.errors import HKVError
from hkv.oracle.exploration import answered
from hkv.oracle.log_file import read_log
from hkv.testing.planting import Patch, applied
from tests.mutants.catalogue import MUTANTS
from tests.rtp_llm.explored import SPACES, explored, world

DEPTH = 5

EXPLORE = ["explore", "--dialect", "rtp-llm/single", "--groups", "full:1", "--requests", "1"]

SWEEP, FREED = "reference.dialects.rtp_llm.lists:sweep", "release(c, group.pool, block if goes else 0, Role.REQUEST)"
FREE = Patch(SWEEP, FREED, FREED.replace("if goes", "if goes and at > 0"))
HELD = Patch("reference.dialects.rtp_llm.evicting:leave", "Role.CACHE", "Role.REQUEST")
TWICE = Patch(SWEEP, FREED, f"{FREED}; {FREED}")


def _grown(before: tuple[structs.RtpOp, ...]) -> bool:
    """True if tokens were appended after the last allocation."""
    kinds = [type(each) for each in before if isinstance(each, structs.AppendOp | structs.MallocOp)]
    return kinds[-1] is structs.AppendOp


def sequences(header: structs.RtpHeader, before: tuple[structs.RtpOp, ...], depth: int) -> Iterator[Any]:
    """Every sequence of up to `depth` more operations, performed from the start; yields how each leaves the cache."""
    engine, tokens = RtpNumpyEngine(header), []
    for operation in before:
        engine.perform(operation)
        if isinstance(operation, structs.RequestOp):
            tokens = list(operation.tokens)
        if isinstance(operation, structs.AppendOp):
            tokens = tokens + operation.tokens[0]
        if isinstance(operation, structs.DropOp):
            tokens = []
    state = engine.state()
    yield tuple(tokens), repr((state.pools, state.lists, state.cached))
    if depth == 0:
        return
    possible: list[structs.RtpOp] = [structs.EvictOp(least=1)] if state.cached else []
    if not tokens:
        texts = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
        possible += [structs.RequestOp(id="r1", tokens=text) for text in texts]
    elif state.lists:
        possible += [structs.MallocOp(id="r1"), structs.FreeOp(id="r1")]
        grown = _grown(before)
        possible += [] if grown else [structs.InsertOp(id="r1")]
        possible += [structs.AppendOp(id="r1", tokens=[[token]]) for token in (0, 1) if len(tokens) == 1]
    else:
        possible += [structs.MallocOp(id="r1", device_cache=flag) for flag in (True, False)]
        possible.append(structs.DropOp(id="r1"))
    for operation in possible:
        yield from sequences(header, (*before, operation), depth - 1)


@pytest.mark.parametrize("name", ["single", "hybrid"])
def test_it_reaches_what_all_sequences_of_operations_reach(name: str) -> None:
    """Without merging states, and from the empty cache each time."""
    search = explored(name, tree=True)
    report = search.report
    assert report.exhausted
    assert sum(report.by_operation.values()) == report.transitions > report.states
    header, found = world(name, tree=True).header, set()
    for state in range(report.states):
        way = search.way(state)
        if len(way) <= DEPTH:
            found.add(next(sequences(header, way, 0)))
    assert found == set(sequences(header, (), DEPTH))
    assert len(found) > 40


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("tree", [False, True])
def test_no_invariant_is_broken(name: str, tree: bool) -> None:
    report = explored(name, tree=tree, limit_states=120).report
    assert report.counterexample is None
    assert report.transitions > report.states


@pytest.mark.parametrize(
    ("edits", "invariant", "operations"),
    [
        ((FREE,), "rtp references", "request malloc free"),
        ((HELD,), "rtp references", "request malloc insert evict"),
        ((TWICE,), "totality", "request malloc free"),
        (MUTANTS["rtp-largest-ids-first"].edits, "rtp order of blocks", "request malloc"),
        (MUTANTS["rtp-silent-insertion"].edits, "rtp version", "request malloc insert"),
        (MUTANTS["rtp-most-recently-used-leaves"].edits, "rtp eviction", "request malloc insert evict"),
        (MUTANTS["rtp-every-group-is-the-first"].edits, "rtp adoption", "request malloc insert free malloc"),
    ],
)
def test_a_planted_defect_has_a_shortest_counterexample(
    edits: tuple[Patch, ...], invariant: str, operations: str
) -> None:
    with applied(*edits):
        found = explored("hybrid").report.counterexample
        assert found is not None
        performed, answers = answered(found)
    assert found.invariants == (invariant,)
    assert [str(type(each).__struct_config__.tag) for each in found.operations] == operations.split()
    assert len(performed) == len(answers) == len(found.operations) + (invariant != "totality")


def test_names_know_no_names_of_requests() -> None:
    one, other = world("single"), world("single")
    for each, ids in ((one, "ab"), (other, "ba")):
        for id, tokens in zip(ids, ([0], [1, 0]), strict=True):
            each.perform(structs.RequestOp(id=id, tokens=tokens))
    assert one.name() == other.name()
    one.perform(structs.MallocOp(id="a"))
    other.perform(structs.MallocOp(id="a"))
    assert one.name() != other.name()


def test_the_command_ends_with_0_1_or_at_its_limits(tmp_path: pathlib.Path) -> None:
    def run(*more: str) -> tuple[int, dict[str, Any]]:
        arguments = [*EXPLORE, "--num-blocks", "3", "--max-model-len", "1", "--json", "-", *more]
        done = CliRunner().invoke(cli, [*arguments, "--save", str(tmp_path / "found.jsonl")])
        return done.exit_code, json.loads(done.stdout)

    status, record = run()
    assert (status, record["exhausted"], record["counterexample"]) == (0, True, None)
    status, record = run("--limit-states", "5")
    assert (status, record["exhausted"]) == (0, False)
    with applied(FREE):
        status, record = run()
    assert (status, record["counterexample"]["invariants"]) == (1, ["rtp references"])
    log = read_log(str(tmp_path / "found.jsonl"))
    assert [type(each) for each in log.operations] == [
        structs.RequestOp,
        structs.MallocOp,
        structs.FreeOp,
        structs.StateOp,
    ]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--watermark", "0.5"], "--watermark"),
        (["--groups", "full:1,swa:1:2"], "dialect"),
        (["--groups", "full:1,full:2", "--dialect", "rtp-llm/hybrid"], "block_size"),
        (["--groups", "swa:1:2", "--dialect", "rtp-llm/single"], "groups"),
        (["--prompt", "3", "--max-model-len", "2"], "prompt"),
        (["--workers", "3"], "--workers"),
        (["--plant", "window-one-short"], "--plant"),
        (["--num-blocks", "1"], "--num-blocks"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(more: list[str], named: str) -> None:
    done = CliRunner().invoke(cli, [*EXPLORE, *more])
    assert isinstance(done.exception, HKVError) or done.exit_code == 2
    assert named in f"{done.output}{done.exception}"

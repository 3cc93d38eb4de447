"""Commands under RTP-LLM's rules from the outside: record, check, diff, shrink, explain, and what they refuse."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
from click.testing import CliRunner, Result

import hkv.cli
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.traffic import rtp_features
from hkv.oracle.log_file import read_log, write_log
from hkv.testing.planting import applied
from tests.mutants.catalogue import MUTANTS

ME = f"{__name__}:"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(hkv.cli.cli, list(arguments))


class Largest(RtpNumpyEngine):
    """Hands out the largest free ids."""

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        with applied(*MUTANTS["rtp-largest-ids-first"].edits):
            return super().perform(operation)


class Forgetful(RtpNumpyEngine):
    """Enters nothing when there are two groups."""

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        if isinstance(operation, structs.InsertOp) and len(self.config.policies) > 1:
            return None
        return super().perform(operation)


@pytest.mark.parametrize("dialect", NAMES)
def test_recorded_logs_agree_and_exercise_the_rules(dialect: str, tmp_path: pathlib.Path) -> None:
    rules: set[str] = set()
    for feature in rtp_features(dialect):
        for seed in range(6):
            path = str(tmp_path / f"{feature}-{seed}.jsonl")
            found = run("record", "--dialect", dialect, "--feature", feature, "--seed", str(seed),
                        "-o", path, "--json", "-")  # fmt: skip
            assert found.exit_code == 0, found.output
            rules |= set(json.loads(found.output)["rules"])
    assert run("check", str(tmp_path)).exit_code == 0
    wanted = {"nothing-cached", "hit", "grown", "permanent", "retryable", "internal-error"}
    wanted |= {"copy-last", "put", "evict-asked", "export", "hold-for-connector", "peak"}
    wanted |= {"hit-with-holes", "clean"} if dialect != NAMES[0] else set()
    assert wanted <= rules


def test_diff_finds_a_wrong_engine_and_makes_the_case_small(tmp_path: pathlib.Path) -> None:
    found = run("diff", "--dialect", NAMES[1], "--engines", f"{ME}Largest,numpy", "--seeds", "3", "--feature", "core",
                "--save", str(tmp_path))  # fmt: skip
    assert found.exit_code == 1
    assert "broken invariant: rtp order of blocks" in found.output
    (saved,) = tmp_path.glob("*.jsonl")
    assert len(read_log(saved).operations) == 2, "a request and its allocation"
    assert run("check", str(saved)).exit_code == 0
    assert run("check", str(saved), "--engine", f"{ME}Largest").exit_code == 1


def test_shrink_leaves_what_the_difference_needs(tmp_path: pathlib.Path) -> None:
    log, small = tmp_path / "log.jsonl", tmp_path / "small.jsonl"
    for seed in range(20):
        run("record", "--engine", "numpy", "--dialect", NAMES[1], "--feature", "core", "--seed", str(seed), "-o", str(log))  # fmt: skip  # noqa: E501
        if run("check", str(log), "--engine", f"{ME}Forgetful").exit_code == 1:
            break
    found = run("shrink", str(log), "--engine", f"{ME}Forgetful", "-o", str(small))
    assert found.exit_code == 0, found.output
    kept = read_log(small)
    names = [str(type(operation).__struct_config__.tag) for operation in kept.operations]
    assert len(kept.header.groups) == 2, "with one it does nothing wrong"
    assert "insert" in names, "what it does wrong"
    assert len(names) <= 8 < len(read_log(log).operations)
    assert run("shrink", str(small), "--engine", "numpy").exit_code != 0, "nothing to shrink where engines agree"


def test_an_engine_in_a_process(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(
        "import sys, msgspec\n"
        "from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine\n"
        "from hkv.dialects.rtp_llm import log as structs\n"
        "engine = RtpNumpyEngine(msgspec.json.decode(sys.stdin.readline(), type=structs.RtpHeader))\n"
        "print('null', flush=True)\n"
        "for line in sys.stdin:\n"
        "    kind = structs.FORMAT.operations[msgspec.json.decode(line)['op']]\n"
        "    answer = engine.perform(msgspec.json.decode(line, type=kind))\n"
        "    print(msgspec.json.encode(answer).decode(), flush=True)\n"
    )
    command = f"cmd:{sys.executable} {program}"
    found = run(
        "diff", "--dialect", NAMES[2], "--engines", f"{command},numpy", "--seeds", "1", "--feature", "connector"
    )
    assert found.exit_code == 0, found.output
    assert "no difference" in found.output


HEADER = structs.RtpHeader(
    oplog=2,
    dialect=NAMES[1],
    feature="story",
    num_blocks=[12],
    groups=[
        structs.RtpGroup(tag="full", type="FULL", block_size=2),
        structs.RtpGroup(tag="state", type="LINEAR", block_size=2),
    ],
    block_size=2,
    linear_step=3,
)
STORY = [
    structs.RequestOp(id="a", tokens=[1, 2, 3, 4, 5]),
    structs.MallocOp(id="a"),
    structs.RequestOp(id="b", tokens=[1, 2, 3, 4, 5, 6]),
    structs.MallocOp(id="b"),
    structs.InsertOp(id="a"),
    structs.FreeOp(id="a"),
    structs.RequestOp(id="c", tokens=[1, 2, 3, 4, 5, 6]),
    structs.MallocOp(id="c"),
    structs.RequestOp(id="d", tokens=[9] * 7),
    structs.MallocOp(id="d"),
]


@pytest.fixture
def story(tmp_path: pathlib.Path) -> str:
    engine, path = RtpNumpyEngine(HEADER), tmp_path / "story.jsonl"
    write_log(path, HEADER, STORY, [engine.perform(operation) for operation in STORY])
    return str(path)


def test_explain_says_why_a_hit_is_not_longer(story: str) -> None:
    """`a` entered two keys of the full group, and a state under neither: states lie on every third block."""
    found = run("explain", story, "--line", "9", "--json", "-")
    assert found.exit_code == 0, found.output
    told = json.loads(found.output)
    assert (told["request"], told["hit"], told["found"], told["alignment"]) == ("c", 0, 0, 2)
    full, state = told["groups"]
    assert (full["largest"], full["lacks"]) == (4, [])
    assert state["largest"] == 0
    assert state["lacks"][0]["why"] == "entered on line 6 without a block of this group"


def test_explain_tells_what_became_of_blocks(story: str) -> None:
    told = json.loads(run("explain", story, "--line", "7", "--json", "-").output)
    texts = {block: [text for _, text in events] for block, events in told["blocks"].items()}
    assert texts["1"] == ["handed out to a, group 0, slot 0", "cached by a for group 0", "given back by a, cached"]
    assert texts["4"] == ["handed out to a, group 1, slot 2", "given back by a, free"]


def test_explain_knows_requests_that_are_not_entered_yet(story: str) -> None:
    told = json.loads(run("explain", story, "--line", "5", "--json", "-").output)
    assert {lack["why"] for group in told["groups"] for lack in group["lacks"]} == {
        "computed by a, which was not entered yet"
    }


def test_explain_says_what_a_refused_request_wanted(story: str) -> None:
    text = run("explain", story, "--line", "11").output
    assert "refused, retryable; it needs before a hit 6 blocks, 3 of 11 available; reserve 0" in text, text


def test_explain_says_how_far_each_group_comes_and_where_its_blocks_went(story: str) -> None:
    text = run("explain", story, "--line", "9").output
    assert "longest hit by definition: 0 tokens; every hit is a multiple of 2" in text
    assert "FULL:2" in text
    assert "LINEAR:2" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["record", "--dialect", NAMES[0], "--feature", "partial", "--seed", "1"],
            "one of core, tree, fork, connector",
        ),
        (["record", "--dialect", NAMES[0], "--feature", "context_parallel", "--seed", "1"], f"for {NAMES[0]}"),
        (["record", "--dialect", NAMES[0], "--feature", "core", "--seed", "1", "--version", "1"], "version = 1"),
        (
            ["record", "--dialect", NAMES[0], "--feature", "core", "--seed", "1", "--kinds", "mla"],
            "one of FULL, LINEAR",
        ),
        (["record", "--feature", "fork", "--seed", "1"], "for vllm-0.33"),
    ],
)
def test_record_refuses_by_name(arguments: list[str], told: str, tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["hkv", *arguments, "--engine", "numpy", "-o", str(tmp_path / "x.jsonl")])
    with pytest.raises(SystemExit) as caught:
        hkv.cli.main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.jsonl").exists()


def test_block_ids_are_compared_exactly() -> None:
    found = run("diff", "--dialect", NAMES[0], "--engines", "numpy,numpy", "--seeds", "1", "--ids", "isomorphic")
    assert "rules say which block is handed out" in str(found.exception)

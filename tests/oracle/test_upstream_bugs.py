"""`docs/not-modelled.md`: every known defect is told, with something that shows it."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.quoted.console import CUT, Shown, difference, shown_in
from hkv import chunks
from hkv.cli.check import command
from hkv.contract import registry
from hkv.dialects.vllm import bugs as vllm
from hkv.dialects.vllm.engines.engine import Engine, attempt
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Header
from hkv.errors import EngineFailure, HKVError
from hkv.oracle.check import Difference, check_log, with_bugs
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.verbs import check
from tests.oracle.sample import HEADER
from tests.oracle.test_installed_vllm import foreign_warnings

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "not-modelled.md").read_text()
LOGS = sorted((DOCS / "upstream-bugs").glob("*.jsonl"))
VLLM_LOGS = [path for path in LOGS if path.stem in vllm.BUGS]
SCRIPTS = ("planning", "chunks")
BUGS = {**chunks.BUGS, **{name: bug for each in registry.dialects() for name, bug in each.bugs.items()}}


def told_by(script: str) -> Shown:
    """Output of a script as the page shows it."""
    (found,) = (shown for shown in shown_in(PAGE) if shown.command == f"python docs/upstream-bugs/{script}.py")
    return found


def test_every_defect_is_shown_once() -> None:
    shown = [path.stem for path in LOGS]
    for script in SCRIPTS:
        shown += [line for line in told_by(script).output if re.fullmatch(r"[a-z-]+", line)]
    assert sorted(shown) == sorted(BUGS)
    for path in LOGS:
        assert f"`{path.stem}`" in PAGE


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_print_what_the_page_says(script: str) -> None:
    command = [sys.executable, str(DOCS / "upstream-bugs" / f"{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (problem := difference(told_by(script), done.stdout)) is None, problem
    assert CUT not in told_by(script).output
    for contract, defect in re.findall(r"contract: (.*)\n  defect:   (.*)", done.stdout):
        assert contract != defect


@pytest.mark.parametrize("path", LOGS, ids=[path.stem for path in LOGS])
def test_logs_keep_the_contract_and_show_the_defect(path: pathlib.Path) -> None:
    log = read_log(path)
    assert len(log.operations) <= 8
    assert check_log(log, engine_factory("numpy")) is None
    found = check_log(log, engine_factory("numpy"), [path.stem])
    assert isinstance(found, Difference)
    assert found.line == len(log.operations) + 1
    bugs = registry.dialect_of(log.header.dialect).bugs
    others = [name for name in bugs if name != path.stem]
    assert check_log(log, engine_factory("numpy"), others) is None


def test_the_compiled_cache_fails_at_the_line_that_does_it() -> None:
    (path,) = (path for path in LOGS if path.stem == "plan-outlives-refusal")
    log = read_log(path)
    assert check_log(log, engine_factory("jax")) is None
    found = check_log(log, engine_factory("jax"), [path.stem])
    assert isinstance(found, Difference)
    assert (found.line, found.operation) == (len(log.operations) + 1, "commit")


@pytest.mark.vllm
@foreign_warnings
@pytest.mark.parametrize("path", VLLM_LOGS, ids=[path.stem for path in VLLM_LOGS])
def test_vllm_differs_at_the_last_line(path: pathlib.Path) -> None:
    log = read_log(path)
    found = check_log(log, engine_factory("vllm"))
    assert isinstance(found, Difference)
    assert found.line == len(log.operations) + 1


# Failures of vLLM 0.33 by itself: the reference goes on, unless the defect is asked for by name.

TAIL = msgspec.convert(
    {
        **HEADER,
        "oplog": 2,
        "num_blocks": 40,
        "groups": [
            {"kind": "sliding_window", "block_size": 2, "window": 7},
            {"kind": "mamba", "block_size": 4},
            {"kind": "full_attention", "block_size": 1},
        ],
        "hash_block_size": 1,
        "scheduler_block_size": 4,
        "eagle": True,
        "prefill_lookahead": 3,
    },
    Header,
)


def grow(engine: Engine, new: int) -> Allocation:
    fields = {"hit": 0, "lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}
    return engine.allocate(oplog.AllocateOp(id="r1", new=new, **fields))


def outlive(engine: Engine) -> Allocation:
    """The prompt's last state is registered at 3 tokens when 5 are computed, in the next column."""
    engine.request("r1", [4, 4, 4, 1], None)
    for new, appended in ((1, []), (3, [1]), (1, [4])):
        assert grow(engine, new).blocks is not None
        engine.advance("r1", new)
        engine.append("r1", appended)
    engine.commit("r1", 5)
    return grow(engine, 1)


def test_tail_key_outlives_state() -> None:
    engine = NumpyEngine(TAIL)
    assert outlive(engine).blocks is not None
    state = engine.state()
    assert not {str(block) for block in state.free} & set(state.refs)
    assert engine.copies() == []


def test_tail_key_outlives_state_by_name() -> None:
    with pytest.raises(EngineFailure, match="given back"):
        outlive(NumpyEngine(msgspec.structs.replace(TAIL, bugs=["tail-key-outlives-state"])))


@pytest.mark.vllm
@foreign_warnings
def test_tail_key_outlives_state_in_vllm() -> None:
    with pytest.raises(HKVError, match="vLLM not to raise AssertionError"):
        outlive(engine_factory("vllm")(TAIL))


# A log that differs only by a known upstream defect is said to agree under it, by name.

ROOT = pathlib.Path(__file__).resolve().parents[2]


def recorded(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A log of an engine with a defect, from before the defect had a name."""
    log = read_log(ROOT / "docs" / "upstream-bugs" / f"{name}.jsonl")
    engine = NumpyEngine(with_bugs(log.header, [name]))
    path = folder / f"{name}.jsonl"
    write_log(path, log.header, log.operations, [attempt(engine, operation) for operation in log.operations])
    return path


@pytest.mark.parametrize("name", ["begun-state-under-later-key", "checkpoint-under-later-key"])
def test_the_verdict_names_the_defect(name, tmp_path):
    path = recorded(name, tmp_path)
    (log,) = check([path]).checked
    assert (log.difference, log.known_defects) == (None, (name,))
    assert log.verdict == ("known defect", f"agrees under {name}")
    assert check([path]).agrees
    (named,) = check([path], bugs=[name]).checked
    assert named.verdict == ("agrees", "")
    said = CliRunner().invoke(command, [str(path)])
    assert said.exit_code == 0
    assert f"known defect: {path} agrees under {name}: " in said.output
    assert "0 of 1 logs agree with engine numpy, 1 more under known defects of the engine recorded" in said.output
    assert CliRunner().invoke(command, [str(path), "--fail-on", "known defect"]).exit_code == 1


def test_what_no_known_defect_explains_differs(tmp_path):
    path = recorded("begun-state-under-later-key", tmp_path)
    *lines, last = path.read_bytes().splitlines()
    answered = msgspec.json.decode(last)
    answered["want"]["hit"] += answered["want"]["hit"] or 1
    path.write_bytes(b"\n".join([*lines, msgspec.json.encode(answered)]) + b"\n")
    (log,) = check([path]).checked
    assert log.known_defects == ()
    assert log.difference is not None


def test_defects_may_be_named_in_several_options(tmp_path):
    path = recorded("begun-state-under-later-key", tmp_path)
    options = ["--bugs", "window-one-never-hits", "--bugs", "begun-state-under-later-key"]
    assert "1 of 1 logs agree" in CliRunner().invoke(command, [str(path), *options]).output

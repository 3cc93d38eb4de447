"""`.ci/peers`: its shares, what it lets be skipped, its table, and what it refuses; no environment is made here."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from benchmarks.peer_environments import PEERS
from tests.needs import NEEDS

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = ROOT / ".ci" / "peers"
pytest_plugins = ["pytester"]

CASES = """
    import pytest

    @pytest.mark.vllm
    def test_passes():
        pass

    @pytest.mark.vllm
    def test_is_skipped():
        pytest.skip("not today")

    @pytest.mark.vllm
    @pytest.mark.gpu
    def test_needs_more():
        pytest.skip("no GPU")

    @pytest.mark.vllm
    @pytest.mark.xfail(strict=True)
    def test_is_known_to_fail():
        assert False

    @pytest.mark.lmcache
    def test_of_another_peer():
        assert False

    def test_of_none():
        assert False
"""


def run_plugin(pytester: pytest.Pytester, *options: str) -> dict:
    """The plugin's report of a run over `CASES`."""
    pytester.syspathinsert(ROOT / ".ci")
    pytester.makeconftest("from tests import needs\ndef pytest_configure(config): needs.register(config)")
    pytester.makepyfile(CASES)
    report = pytester.path / "report.json"
    pytester.runpytest_inprocess("-p", "peer_tests", "-p", "no:cacheprovider", "--report", str(report), *options)
    return json.loads(report.read_text())


def by_name(report: dict) -> dict[str, str]:
    return {name.split("::")[1]: outcome for name, outcome in report["outcomes"].items()}


def test_a_skip_fails_where_everything_that_it_names_is_provided(pytester: pytest.Pytester) -> None:
    report = run_plugin(pytester, "--provides", "vllm")
    assert by_name(report) == {
        "test_passes": "passed",
        "test_is_skipped": "failed",
        "test_needs_more": "skipped",
        "test_is_known_to_fail": "skipped",
    }
    assert [reason for name, reason in report["reasons"].items() if "needs_more" in name] == ["Skipped: no GPU"]


def test_shares_are_disjoint_and_together_all(pytester: pytest.Pytester) -> None:
    shares = [set(by_name(run_plugin(pytester, "--provides", "vllm", "--share", f"{i}/3"))) for i in (1, 2, 3)]
    assert sorted(map(len, shares)) == [1, 1, 2]
    assert len(set().union(*shares)) == 4


def test_a_listing_has_the_needs_of_every_test(pytester: pytest.Pytester) -> None:
    needs = run_plugin(pytester, "--collect-only")["needs"]
    assert {name.split("::")[1]: marked for name, marked in needs.items()} == {
        "test_passes": ["vllm"],
        "test_is_skipped": ["vllm"],
        "test_needs_more": ["vllm", "gpu"],
        "test_is_known_to_fail": ["vllm"],
        "test_of_another_peer": ["lmcache"],
        "test_of_none": [],
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "FOLDER: expected one"),
        (["folder", "--list"], "FOLDER: expected one"),
        (["folder", "--shard", "0/2"], "'0/2': expected I/N with 1 <= I <= N"),
        (["folder", "--shard", "3/2"], "'3/2': expected I/N with 1 <= I <= N"),
        (["folder", "--shard", "half"], "'half': expected I/N with 1 <= I <= N"),
        (["folder", "--minutes", "nan"], "'nan': expected a positive number of minutes"),
        (["folder", "--minutes", "-1"], "'-1': expected a positive number of minutes"),
        (["folder", "--only", "jax"], "invalid choice: 'jax'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_of_something_else_is_kept(tmp_path: pathlib.Path) -> None:
    kept = tmp_path / "vllm" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("years of work")
    done = subprocess.run([sys.executable, COMMAND, tmp_path, "--only", "vllm"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "expected none, an empty one or a Python environment" in done.stdout
    assert kept.read_text() == "years of work"


def test_vllms_own_tests_are_taken_from_a_folder_and_no_other(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    own = importlib.import_module("vllm_tests")
    (tmp_path / "packages").mkdir()
    monkeypatch.setenv("HKV_VLLM_TESTS", str(tmp_path))
    with pytest.raises(own.PeerError, match=r"HKV_VLLM_TESTS = .*: expected the folder tests of vLLM"):
        own.fetch(pathlib.Path(sys.executable), tmp_path)
    (tmp_path / "v1").mkdir()
    assert own.fetch(pathlib.Path(sys.executable), tmp_path) == tmp_path.resolve()
    assert (own.MODELS / "facebook" / "opt-125m" / "config.json").is_file()


def test_markers_of_peers_are_needs() -> None:
    for peer in PEERS.values():
        assert set(peer.markers) <= set(NEEDS)


def test_no_test_asks_for_a_peer_without_its_marker() -> None:
    """No test says again what a marker says, or skips it silently."""
    asked = re.compile(r"(importorskip|find_spec)\(\s*[\"'](torch|triton|jax_triton|vllm|lmcache|ray)\b")
    skips = re.compile(r"pytest\.skip\(str\(error\)\)")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        assert "importorskip" not in {match[1] for match in asked.finditer(text)}, path
        assert skips.search(text) is None, path


# `.ci/nightly`: all of its commands are run, whatever fails, with options that they have.


NIGHTLY = ROOT / ".ci" / "nightly"


def run(folder: pathlib.Path, failing: str, *more: str) -> tuple[int, str, list[list[str]]]:
    """Its exit status, last line and commands, with an interpreter that fails at commands that have a word."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/commands\ncase "$*" in *{failing}*) exit 1;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    command = [str(NIGHTLY), str(folder / "made"), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    commands = (folder / "commands").read_text().splitlines()
    return done.returncode, done.stdout.splitlines()[-1], [shlex.split(line)[1:] for line in commands]


@pytest.mark.parametrize(("failing", "says"), [("no-such-word", "nothing"), ("mutation.py", "mutation")])
def test_everything_is_run_whatever_fails(failing: str, says: str, tmp_path: pathlib.Path) -> None:
    status, last, commands = run(tmp_path, failing, str(tmp_path / "python"))
    assert (status, last) == (int(says != "nothing"), f"failed: {says}")
    assert [" ".join(command[:2]) for command in commands] == [
        f"benchmarks/mutation.py {tmp_path}/made/verdicts",
        "-m tests.mutants",
        "-m tests.mutants",
        "benchmarks/claims.py --vllm-python",
    ]
    assert sorted(path.name for path in (tmp_path / "made").glob("*.log")) == [
        "claims.log",
        "mutants-in-vllm.log",
        "mutants.log",
        "mutation.log",
    ]


def test_its_commands_have_these_options(tmp_path: pathlib.Path) -> None:
    _, _, commands = run(tmp_path, "no-such-word", str(tmp_path / "python"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for program in {tuple(command[: 2 if command[0] == "-m" else 1]) for command in commands}:
        line = [sys.executable, *program, "--help"]
        said = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        used = {word for command in commands if tuple(command[: len(program)]) == program for word in command}
        assert {word for word in used if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", said))


def test_without_a_folder_it_is_refused() -> None:
    done = subprocess.run([str(NIGHTLY)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: .ci/nightly FOLDER [VLLM/bin/python]\n")

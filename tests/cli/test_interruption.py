"""Ctrl-C: exit status 130 soon after, no crash, what was found so far, and no process left behind."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from hkv.cli import progress
from hkv.cli.progress import INTERRUPTED, counting_bar, level_bar, progress_bar
from tests.cli.commands import WRONG, Inputs, make_inputs, perform

SOON = 10.0
"""Seconds until an interrupted process has to be gone: two, and what a busy machine adds."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def interrupt_when(process: subprocess.Popen[str], mark: str) -> tuple[int, str, str]:
    """Sends SIGINT once a line with `mark` is on standard error; status, output, and what came on standard error."""
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if mark in line:
                break
        else:
            raise AssertionError(f"no line with {mark!r}")
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - sent < SOON
        return process.returncode, out, err
    finally:
        process.kill()


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A process of its own that hears of Ctrl-C, also under a shell in the background, which has it ignored.

    Nothing that was compiled before is found again in it.
    """
    own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is handled here is at its default there
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**own, "HKV_COMPILATION_CACHE": "off", **environment},
        )
    finally:
        signal.signal(signal.SIGINT, before)


COMPILING = {
    "explore": ("explore", "--num-blocks", "5"),
    "diff": ("diff", "--engines", "jax,numpy", "--feature", "core"),
    "check": ("check", "{log}", "--engine", "jax"),
}
"""Commands that compile, each in a way of its own: the explorer's programs, a stream of operations, a log."""


@pytest.mark.parametrize("command", COMPILING)
def test_while_compiling(command: str, inputs: Inputs) -> None:
    """Jaxlib goes on compiling on a thread of its own, which crashes where the interpreter shuts down under it."""
    arguments = [text.format(log=inputs.log) for text in COMPILING[command]]
    program = {"explore": "Compiling jit(_perform)", "diff": "Compiling jit(", "check": "Compiling jit("}[command]
    process = start("-m", "hkv", *arguments, JAX_LOG_COMPILES="1")
    status, out, err = interrupt_when(process, program)
    assert status == INTERRUPTED, err
    assert err.splitlines()[-1] == "hkv: interrupted"
    assert "Traceback" not in err
    if command == "explore":
        assert "nothing explored: stopped while the program was being compiled" in out


def test_inside_a_native_call(tmp_path: pathlib.Path) -> None:
    """No exception reaches the main thread there: another one says the last words and ends the process."""
    script = """
        import hashlib, sys
        import hkv.cli, hkv.cli.vectors
        from hkv.cli.progress import interruption

        def endless(*arguments):
            with interruption().saying(lambda: print("three so far")):
                print("ready", file=sys.stderr, flush=True)
                hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 2**31 - 1)

        hkv.cli.vectors.write_vectors = endless
        hkv.cli.main()
    """
    process = start("-c", textwrap.dedent(script), "vectors", str(tmp_path / "out"))
    assert interrupt_when(process, "ready") == (INTERRUPTED, "three so far\n", "hkv: interrupted\n")


def test_no_engine_process_is_left_behind(inputs: Inputs, tmp_path: pathlib.Path) -> None:
    """Not even one that hangs, and did not hear of the signal itself."""
    engine = tmp_path / "engine.py"
    engine.write_text(
        "import os, sys, time\nprint('engine', os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(600)\n"
    )
    process = start(
        "-m", "hkv", "check", str(inputs.log), "--engine", f"cmd:{sys.executable} {engine}", "--timeout=600"
    )
    assert process.stderr is not None
    pid = int(next(line for line in process.stderr if line.startswith("engine")).split()[1])
    time.sleep(0.2)  # it is asked for its first answer
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED
    deadline = time.monotonic() + SOON
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not pathlib.Path(f"/proc/{pid}").exists()
    process.stderr.close()
    assert process.stdout is not None
    process.stdout.close()


def interrupted_at(call: int, function):
    """A function whose call of that number, from 1, is interrupted."""
    calls = iter(range(1, 1 << 30))

    def wrapped(*arguments, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return wrapped


def test_check_says_which_logs_it_looked_at(inputs: Inputs, tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    import hkv.oracle.verbs as module

    monkeypatch.setattr(module, "check_log", interrupted_at(3, module.check_log))
    path = tmp_path / "report.json"
    ended = perform(["check", *[str(inputs.log)] * 5, "--json", str(path)], tmp_path)
    assert ended.status == INTERRUPTED
    assert b"2 of 2 logs agree" in ended.out
    assert len(json.loads(path.read_bytes())["logs"]) == 2
    assert capsys.readouterr().err == "hkv: interrupted\n"


def test_shrink_writes_the_smallest_case_so_far(inputs: Inputs, tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    from hkv.oracle.shrink import Shrinker

    monkeypatch.setattr(Shrinker, "failing", interrupted_at(2, Shrinker.failing))
    arguments = inputs.arguments("shrink", tmp_path)
    ended = perform(arguments, tmp_path)
    assert ended.status == INTERRUPTED
    assert b"not looked for: interrupted" in ended.out
    assert capsys.readouterr().err == "hkv: interrupted\n"
    assert pathlib.Path(arguments[-1]).read_bytes() == inputs.failing.read_bytes()


def test_diff_says_which_differences_it_found(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    import hkv.cli.diff as module

    monkeypatch.setattr(module.Comparison, "seed", interrupted_at(2, module.Comparison.seed))
    arguments = ["--kinds", "full_attention", "--max-groups", "1", "--version", "1", "--seeds", "10"]
    features = ["--feature", "core", "--feature", "eagle"]
    path = tmp_path / "report.json"
    ended = perform(
        ["diff", "--engines", f"{WRONG},numpy", *features, *arguments, "--no-shrink", "--json", str(path)], tmp_path
    )
    assert ended.status == INTERRUPTED
    found = json.loads(path.read_bytes())["differences"]
    assert len(found) >= 1
    assert f"{len(found)} difference".encode() in ended.out
    assert b"stopped after" in ended.out
    assert capsys.readouterr().err == "hkv: interrupted\n"


def test_replay_says_how_far_it_came(inputs: Inputs, tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    import hkv.cli.replay as module

    def replay(*_, progress, **__):
        progress()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "replay", replay)
    ended = perform(inputs.arguments("replay", tmp_path), tmp_path)
    assert (ended.status, ended.out) == (INTERRUPTED, b"stopped after 1 of 2 requests\n")
    assert capsys.readouterr().err == "hkv: interrupted\n"


def test_an_interrupt_that_arrives_as_another_error(
    inputs: Inputs, tmp_path: pathlib.Path, monkeypatch, capsys
) -> None:
    """The import of an extension turns KeyboardInterrupt into ImportError."""
    import hkv.oracle.verbs as module
    from hkv.cli.progress import interruption

    def broken(*_):
        interruption().requested = True
        raise ImportError("Encountered an error while initializing the extension.")

    monkeypatch.setattr(module, "check_log", broken)
    assert perform(inputs.arguments("check", tmp_path), tmp_path).status == INTERRUPTED
    assert capsys.readouterr().err == "hkv: interrupted\n"


# Progress where standard error is no terminal: a line now and then, none of what ends at once.


def lines(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    """Waits until the line is there: it comes from another thread."""
    deadline, found = time.monotonic() + 20, ""
    while expected not in found and time.monotonic() < deadline:
        time.sleep(0.005)
        found += capsys.readouterr().err
    assert expected in found.splitlines()


def test_lines_say_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    with progress_bar("watching", 1500) as advance:
        lines(capsys, "watching")
        for _ in range(1200):
            advance()
        lines(capsys, "watching: 1,200 of 1,500")
    with counting_bar("shrinking", 20, "operations left") as sink:
        sink(7)
        lines(capsys, "shrinking: 7 operations left")
    with level_bar("compiling") as told:
        lines(capsys, "compiling")
        told("level 3", 0.25)
        lines(capsys, "level 3: 25%")


def test_what_ends_at_once_says_nothing(capsys):
    with progress_bar("watching", 2) as advance:
        advance()
    assert capsys.readouterr().err == ""

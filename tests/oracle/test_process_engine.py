"""Engines in processes of their own: those that work, and all the ways in which they do not."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import select
import shlex
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from hkv.cli.check import command as check
from hkv.cli.diff import command as diff
from hkv.cli.replay import command as replay
from hkv.dialects.vllm.engines.engine import ProcessEngine, attempt
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import LookupOp
from hkv.errors import ConfigError, EngineProcessError, OperationError, UnsupportedConfigError
from hkv.oracle import engines
from hkv.oracle.engines import EngineProcess, engine_factory
from hkv.oracle.log_file import write_log
from hkv.oracle.record import differ, draw, record

SERVE = """
import sys
import msgspec
from hkv.errors import HKVError
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.configuration import FORMAT
from hkv.dialects.vllm.log.structs import Header

def say(value):
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\\n")
    sys.stdout.buffer.flush()

engine = NumpyEngine(msgspec.json.decode(sys.stdin.buffer.readline(), type=Header))
say(None)
for line in sys.stdin.buffer:
    fields = msgspec.json.decode(line)
    name = fields["op"]
    try:
        if name in FORMAT.operations:
            say(FORMAT.encode_answer(apply(engine, msgspec.convert(fields, FORMAT.operations[name]))))
        elif name == "request_keyed":
            say(engine.request_keyed(fields["id"], fields["num_tokens"], fields["keys"]))
        elif name == "extend":
            say(engine.extend(fields["id"], fields["tokens"]))
        else:
            say(engine.num_free())
    except HKVError as error:
        say({"error": str(error)})
"""

ROOT = str(pathlib.Path(__file__).resolve().parent.parent.parent)


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the command line of a Python program."""
    monkeypatch.setenv("PYTHONPATH", ROOT)

    def make(text: str) -> str:
        path = tmp_path / f"engine{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(text))
        return f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}"

    return make


HEADER = draw("core", 0, 2)[0]


def test_it_agrees_with_itself(program) -> None:
    command = program(SERVE)
    for feature, version in (("core", 1), ("partial", 2), ("speculative_state", 3)):
        recording, parted = differ(engine_factory(f"cmd:{command}"), NumpyEngine, feature, 3, version, 8)
        assert parted is None
        assert len(recording.operations) > 50


def test_an_error_of_the_engine_is_an_error(program) -> None:
    engine = ProcessEngine(EngineProcess(HEADER, program(SERVE)))
    with pytest.raises(OperationError, match="lookup nobody"):
        engine.lookup("nobody")
    assert engine.num_free() == HEADER.num_blocks - 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end by itself is killed at once."""
    monkeypatch.setattr(engines, "PATIENCE", 0.1)


ACCEPT = "import sys, time, os, signal\nsys.stdin.readline()\nprint('null', flush=True)\n"

FAILURES = [
    ("sys.stdin.readline(); sys.exit(3)", "ended with exit status 3"),
    ("sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)", "ended with signal SIGKILL"),
    ("sys.stdin.readline(); print('{\"hit\": ', end='', flush=True)", 'exit status 0 after {"hit":'),
    ("sys.stdin.read()", "silent for 0.3 seconds"),
    ("sys.stdin.readline(); print('{', end='', flush=True); sys.stdin.read()", "silent for 0.3 seconds"),
    ("sys.stdin.readline(); print('Traceback: it broke', flush=True); sys.stdin.readline()", "Traceback: it broke"),
    ("sys.stdin.readline(); print('null', flush=True); sys.stdin.readline()", "None"),
    ('sys.stdin.readline(); print(\'{"hit": "x"}\', flush=True); sys.stdin.readline()', "Expected"),
    ("print('hello', flush=True); sys.stdin.read()", "hello"),
]


@pytest.mark.parametrize(("text", "message"), FAILURES)
def test_failures_are_named_in_one_line(program, text: str, message: str) -> None:
    speaker = EngineProcess(HEADER, program(ACCEPT + text))
    engine, child = ProcessEngine(speaker), speaker._process
    if "0.3" in message:
        child._timeout = 0.3  # from here on: a busy machine may take longer to start the program
    if "hello" in text and not child._rest:  # it may have come with the answer before it
        select.select([child._output], [], [], 5)
    begun = child._process
    with pytest.raises(EngineProcessError) as caught:
        engine.lookup("r1")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert begun.returncode is not None
    with pytest.raises(EngineProcessError, match="still runs"):
        engine.step()


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_closes_its_input_is_noticed(program) -> None:
    closing = (
        "import os, sys, time\nsys.stdin.readline()\nos.close(0)\nprint('null')\nsys.stdout.flush()\ntime.sleep(60)"
    )
    engine = ProcessEngine(EngineProcess(HEADER, program(closing)))
    with pytest.raises(EngineProcessError, match="closed its pipes"):
        engine.lookup("r1")


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_does_not_read_is_noticed(program) -> None:
    speaker = EngineProcess(HEADER, program(ACCEPT + "time.sleep(60)"))
    engine = ProcessEngine(speaker)
    speaker._process._timeout = 0.3
    with pytest.raises(EngineProcessError, match="silent"):
        engine.request("r1", list(range(1_000_000)), None)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ('{"unsupported": "windows"}', UnsupportedConfigError),
        ('{"error": "no blocks"}', ConfigError),
        ('{"error": "no blocks", "again": true}', ConfigError),
        ('{"again": 1}', EngineProcessError),
        ('{"again": true, "lacks": 3}', EngineProcessError),
        ("17", EngineProcessError),
        ("ready", EngineProcessError),
    ],
)
def test_answers_to_the_header(program, answer: str, error: type) -> None:
    with pytest.raises(error) as caught:
        ProcessEngine(EngineProcess(HEADER, program(f"input()\nprint({answer!r}, flush=True)\ninput()")))
    assert type(caught.value) is error


@pytest.mark.parametrize("name", ["cmd:", "cmd:/no/such/program", "cmd:'", "cmd:/"])
def test_programs_that_cannot_start(name: str) -> None:
    with pytest.raises((ConfigError, EngineProcessError), match="cmd:"):
        engine_factory(name)(HEADER)


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="no /proc to look for zombies in")
@pytest.mark.usefixtures("impatient")
def test_no_process_is_left(program) -> None:
    command = program(ACCEPT + "sys.stdin.read()")
    stubborn = program(ACCEPT + "time.sleep(60)")
    speakers = [EngineProcess(HEADER, each) for each in (command, command, command, stubborn)]
    engines = [ProcessEngine(speaker) for speaker in speakers]
    pids = [speaker._process._process.pid for speaker in speakers]
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    del engines, speakers
    gc.collect()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_what_an_engine_started_ends_with_it(program, tmp_path: pathlib.Path) -> None:
    started = tmp_path / "started"
    spawn = f"""
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
    open({str(started)!r}, "w").write(str(child.pid))
    """
    engine = ProcessEngine(
        EngineProcess(HEADER, program(textwrap.dedent(ACCEPT) + textwrap.dedent(spawn) + "sys.stdin.read()\n"))
    )
    deadline = time.monotonic() + 20
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    status = pathlib.Path(f"/proc/{started.read_text()}/stat")
    assert status.exists()
    engine.close()
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_check_and_diff_report_a_death_as_the_difference(program, tmp_path: pathlib.Path) -> None:
    command = program(
        SERVE.replace("    name = fields", "    if fields['op'] == 'lookup': sys.exit(7)\n    name = fields")
    )
    recording = record(NumpyEngine, "core", 0, 2, 4)
    log = tmp_path / "a.jsonl"
    write_log(log, recording.header, recording.operations, recording.answers)
    done = CliRunner().invoke(check, [str(log), "--engine", f"cmd:{command}"])
    assert done.exit_code == 1
    assert "ended with exit status 7" in done.output
    how = ["--seeds", "1", "--feature", "core", "--steps", "3", "--no-shrink"]
    done = CliRunner().invoke(diff, ["--engines", f"cmd:{command},numpy", *how])
    assert done.exit_code == 1
    assert "ended with exit status 7" in done.output
    assert "lookup" in done.output


KEPT = SERVE.replace(
    """engine = NumpyEngine(msgspec.json.decode(sys.stdin.buffer.readline(), type=Header))
say(None)
""",
    "open(STARTED, 'a').write('.')\n",
).replace(
    """    name = fields["op"]
""",
    """    name = fields.get("op")
    if name is None:
        engine = NumpyEngine(msgspec.convert(fields, Header))
        say({"again": True})
        continue
""",
)


def test_a_program_that_takes_another_header_is_kept(program, tmp_path: pathlib.Path) -> None:
    """Through configurations, through candidates of shrinking, past a header that it does not implement."""
    started = tmp_path / "started"
    text = f"STARTED = {str(started)!r}\n{KEPT}"
    how = ["--feature", "core", "--seeds", "6", "--steps", "4"]
    done = CliRunner().invoke(diff, ["--engines", f"cmd:{program(text)},numpy", *how])
    assert done.exit_code == 0, done.output
    assert started.read_text() == "."
    wrong = text.replace(
        '    name = fields.get("op")\n',
        '    name = fields.get("op")\n    fields |= {"in_flight": 0} if "in_flight" in fields else {}\n',
    )
    done = CliRunner().invoke(diff, ["--engines", f"cmd:{program(wrong)},numpy", "--feature", "core", "--seeds", "60"])
    assert done.exit_code == 1
    assert "shrunk from" in done.output
    assert len(started.read_text()) < 8
    choosy = text.replace(
        "        engine = NumpyEngine",
        """        if fields["oplog"] == 1:
            say({"unsupported": "version 1", "again": True})
            continue
        engine = NumpyEngine""",
    )
    started.unlink()
    done = CliRunner().invoke(diff, ["--engines", f"cmd:{program(choosy)},numpy", *how])
    assert "of them not implemented (version 1)" in done.output
    assert started.read_text() == "."


def test_a_program_that_does_not_begin_anew_is_refused(program, tmp_path: pathlib.Path) -> None:
    text = f"engine = None\nSTARTED = {str(tmp_path / 'started')!r}\n{KEPT}".replace(
        "        engine = NumpyEngine(", "        engine = engine or NumpyEngine("
    )
    how = ["--engines", f"cmd:{program(text)},numpy", "--feature", "core", "--version", "1", "--seeds", "9"]
    done = CliRunner().invoke(diff, how)
    assert isinstance(done.exception, EngineProcessError)
    assert "answers as in a fresh process" in str(done.exception)


def test_seeds_that_are_not_implemented_are_counted(program) -> None:
    text = 'import sys\nif \'"oplog":1\' in input():\n    print(\'{"unsupported": "version 1"}\', flush=True)\n'
    command = program(text + "else:\n    print('null', flush=True)\ninput()")
    arguments = ["--engines", f"cmd:{command},numpy", "--seeds", "1", "--feature", "core"]
    done = CliRunner().invoke(diff, [*arguments, "--version", "1"])
    assert isinstance(done.exception, ConfigError)
    assert "version 1" in str(done.exception)


def test_python_engines_by_file_and_by_module(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from hkv.dialects.vllm.engines.numpy import NumpyEngine as Mine\n"
        "class Bad(Mine):\n    def lookup(self, id): return 5\n"
    )
    assert attempt(engine_factory(f"{path}:Mine")(HEADER), LookupOp(id="x")).message.startswith("id = 'x'")
    assert "answered 5" in attempt(engine_factory(f"{path}:Bad")(HEADER), LookupOp(id="x")).message
    assert engine_factory("hkv.dialects.vllm.engines.numpy:NumpyEngine") is NumpyEngine
    for name in ("torch", f"{path}:Nothing", f"{tmp_path}/none.py:Mine", "no.such.module:Mine", "hkv:"):
        with pytest.raises(ConfigError, match="engine"):
            engine_factory(name)


def test_replay_drives_a_process(program, tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 1200, "output_length": 20, "hash_ids": [0, 1, 9 + i]} for i in range(6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = f"cmd:{program(SERVE)}"
    arguments = [str(trace), "--groups", "full:16,swa:16:64", "--num-blocks", "400", "--json", "-"]
    one, other = (CliRunner().invoke(replay, [*arguments, "--engine", name]) for name in (command, "numpy"))
    assert one.exit_code == other.exit_code == 0, one.output
    results = [json.loads(done.stdout) for done in (one, other)]
    for name in ("requests", "finished", "hit_tokens", "blocks_in_use_peak", "steps"):
        assert results[0]["totals"][name] == results[1]["totals"][name]
    assert results[0]["totals"]["hit_tokens"] > 1000

"""Observation in processes that are forked, spawned and killed: what was said half a second ago is on disk."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log

PROGRAM = """
import multiprocessing, os, pathlib, sys, time
from hkv.contract import registry
from hkv.dialects.vllm.log import structs as oplog
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import draw

folder, ending = sys.argv[2], sys.argv[3]

def serve(session):
    # A cache that answers as the reference does, a thousand requests a second at most, and says how far it is.
    dialect, header = registry.dialect_of("vllm-0.33"), draw("core", 3, 2)[0]
    engine, sink = engine_factory("numpy")(header), session.sink(dialect)
    note = sink.calls_to(lambda call: call[0](*call[1:]))
    note((sink.begin, header))
    place, told = pathlib.Path(folder, "told"), 0.0
    for number in range(10**9 if ending == "kill" else 3000):
        id = f"r{number}"
        for operation in (oplog.StepOp(), oplog.RequestOp(id=id, tokens=[number % 7]), oplog.DropOp(id=id)):
            note((sink.operation, operation, dialect.perform(engine, operation)))
        sink.step_ends()
        time.sleep(0.001 * (ending == "kill"))
        if time.monotonic() - told > 0.05:
            told = time.monotonic()
            place.with_suffix(".new").write_text(f"{os.getpid()} {3 * (number + 1)}")
            os.replace(place.with_suffix(".new"), place)
    place.write_text(f"{os.getpid()} 9000")

if __name__ == "__main__":
    session = Session(AttachSettings(folder=folder + "/logs"))
    context = multiprocessing.get_context(sys.argv[1])
    if sys.argv[1] == "fork":
        ours = session.sink(registry.dialect_of("vllm-0.33"))  # a cache of the parent's, which stays the parent's
        ours.begin(draw("core", 3, 2)[0])
        process = context.Process(target=serve, args=(session,))
    else:
        process = context.Process(target=spawned)
    process.start()
    process.join()
"""

SPAWNED = """
def spawned():
    serve(Session(AttachSettings(folder=folder + "/logs")))

if __name__"""


def told(folder: pathlib.Path, seconds: float = 60) -> tuple[int, int]:
    """The serving process, and how many operations it had performed a moment ago."""
    place, deadline = folder / "told", time.monotonic() + seconds
    while not place.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process, operations = place.read_text().split()
    return int(process), int(operations)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("ending", ["kill", "end"])
def test_a_log_is_on_disk_however_its_process_ends(start: str, ending: str, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("if __name__", SPAWNED, 1))
    command = [sys.executable, str(program), start, str(tmp_path), ending]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if ending == "kill":
            child, _ = told(tmp_path)
            time.sleep(1.5)
            _, before = told(tmp_path)
            time.sleep(2.0)
            os.kill(child, signal.SIGKILL)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    child, operations = told(tmp_path)
    logs = {path: read_log(path) for path in find_logs([tmp_path / "logs"])}
    (log,) = (log for path, log in logs.items() if pathlib.Path(path).name.startswith(f"{child}-"))
    assert len(log.operations) >= before if ending == "kill" else len(log.operations) == operations == 9000
    assert check_log(log, engine_factory("numpy")) is None
    for path, other in logs.items():
        assert path == log.path or len(other.operations) == 0

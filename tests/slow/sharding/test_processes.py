"""Two processes of four CPU devices each, joined by `jax.distributed`, hold one cache: what one device would."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from tests.slow.sharding.eight_devices import ROOT, environment
from tests.slow.sharding.process import NO_COLLECTIVES

TIMEOUT = 150
ATTEMPTS = 3


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(folder: pathlib.Path, port: int) -> tuple[list[int | None], list[str]]:
    """Exit status and output of both; whatever happens, neither is left behind."""
    logs = [folder / f"process{index}" for index in range(2)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.slow.sharding.process", str(port), str(index)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment(4),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):  # one that failed leaves the other waiting
                break
            time.sleep(0.05)
        return [process.poll() for process in processes], [log.read_text(errors="replace") for log in logs]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_two_processes_hold_one_cache() -> None:
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            codes, outputs = run(pathlib.Path(folder), free_port())
        taken = any("already in use" in output for output in outputs)
        if not (taken and attempt + 1 < ATTEMPTS):
            break
    if all(NO_COLLECTIVES in output for output in outputs):
        pytest.skip(NO_COLLECTIVES)
    assert codes == [0, 0], f"exit {codes}\n" + "\n".join(outputs)
    assert all(output.rstrip().endswith("DONE") for output in outputs), "\n".join(outputs)

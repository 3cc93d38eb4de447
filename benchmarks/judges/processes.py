"""Questions asked in processes of their own, with a time limit each: one that crashes or hangs costs its own answer."""

from __future__ import annotations

import json
import pathlib
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

WORKER = pathlib.Path(__file__).with_name("worker.py")
START_SECONDS = 300.0
"""Importing vLLM may take so long on a busy machine."""


class Worker:
    """A process that answers questions one by one, started anew after it ended or was ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.process: subprocess.Popen[str] | None = None
        self.architectures: frozenset[str] = frozenset()

    def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
          RuntimeError: it ended before it could answer; the message ends with what it said.
        """
        if self.process is not None:
            return
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        greeting = self._read(START_SECONDS)
        if "refused" in greeting:
            raise RuntimeError(f"the process that asks vLLM {greeting['refused']}")
        self.architectures = frozenset(greeting["architectures"])

    def ask(self, config: Mapping[str, Any], tensor_parallel: int) -> dict[str, Any]:
        """The answer, or `{"refused": reason}`."""
        self.start()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"config": config, "tensor_parallel": tensor_parallel}) + "\n")
        self.process.stdin.flush()
        return self._read(self.seconds)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(seconds)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        reason = f"ended: {self._last_words()}" if ready else f"process: no answer within {seconds:.0f} s"
        self.stop()
        return {"refused": reason}

    def _last_words(self) -> str:
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        return said[-1][:200] if said else "without a word"

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.errors.close()

"""Sources of the figures in documents: commands, whose output is read, and functions."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Cost(enum.IntEnum):
    """Time that a source takes on one core, about."""

    SECONDS = 0
    MINUTES = 1
    HOURS = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting in which sources are run.

    Attributes:
      vllm: an interpreter that has vLLM 0.33.0, in place of `VLLM/bin/python`.
      trace: Mooncake's conversation trace, in place of `TRACE`.
      timings: True if timed sources are run: they want cores that nothing else uses.
      cost: the most that one source may cost.
      tests: the folder of vLLM's own tests, in place of `TESTS`.
    """

    vllm: str | None = None
    trace: str | None = None
    timings: bool = False
    cost: Cost = Cost.HOURS
    tests: str | None = None


class SourceError(Exception):
    """A source could not be run, or its output not be read."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A command or a function, and how its figures are read.

    Attributes:
      name: for claims to name it.
      makes: the command line as documents have it, with `VLLM/bin/python`, `TRACE` and `FOLDER` (an empty one) to be
        filled in; or a function without arguments, which returns the figures.
      reads: by name of the figure a regular expression with one group, for the output of a command. Empty: the output
        is JSON, and the figures are what it says.
      cost: how long it takes.
      timed: its figures are times, or ratios of times.
      status: the exit status that the command must end with.
      apart: it writes files, and runs in an empty folder instead of the project's.
    """

    name: str
    makes: str | Callable[[], Mapping[str, Any]]
    reads: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cost: Cost = Cost.SECONDS
    timed: bool = False
    status: int = 0
    apart: bool = False

    @property
    def command(self) -> str:
        """Command as one would type it, or the function's name."""
        return self.makes if isinstance(self.makes, str) else f"{self.makes.__module__}.{self.makes.__qualname__}()"

    def missing(self, setting: Setting) -> list[str]:
        """Options that are missing from the setting; empty if it can be run."""
        needs = []
        if "VLLM/bin/python" in self.command and setting.vllm is None:
            needs.append("--vllm-python")
        if "TRACE" in self.command and setting.trace is None:
            needs.append("--trace")
        if "TESTS" in self.command and setting.tests is None:
            needs.append("--vllm-tests")
        if self.timed and not setting.timings:
            needs.append("--timings, on cores that nothing else uses")
        if self.cost > setting.cost:
            needs.append(f"--cost {self.cost.name.lower()}")
        return needs

    def figures(self, setting: Setting) -> Mapping[str, Any]:
        """Runs it and reads what it says.

        Raises:
          SourceError: it failed, or does not say what it should.
        """
        if not isinstance(self.makes, str):
            return self.makes()
        with tempfile.TemporaryDirectory() as folder:
            output = _output(_words(self.makes, setting, folder), self.status, folder if self.apart else ROOT)
        return self._read(output)

    def _read(self, output: str) -> Mapping[str, Any]:
        if not self.reads:
            try:
                return json.loads(output)
            except ValueError as error:
                raise SourceError(f"{self.command}: the output is no JSON: {error}") from None
        found = {}
        for name, pattern in self.reads.items():
            match = re.search(pattern, output, re.MULTILINE)
            if match is None:
                raise SourceError(f"{self.command}: nothing in the output is a {name}: {pattern}")
            found[name] = match[1]
        return found


def _words(command: str, setting: Setting, folder: str) -> list[str]:
    """The command line to run."""
    words = [
        word.replace("TRACE", setting.trace or "TRACE")
        .replace("TESTS", setting.tests or "TESTS")
        .replace("FOLDER", folder)
        .replace("VLLM/bin/python", setting.vllm or "VLLM/bin/python")
        for word in shlex.split(command)
    ]
    here = {"python": [sys.executable], "hkv": [sys.executable, "-m", "hkv"]}
    return [*here.get(words[0], words[:1]), *words[1:]]


def _output(words: list[str], status: int, folder: str | pathlib.Path) -> str:
    """Standard output of a program that must end with an exit status; rich's tables get room for their lines."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != status:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise SourceError(f"{shlex.join(words)}: exit status {done.returncode}: {' '.join(last)}")
    return done.stdout

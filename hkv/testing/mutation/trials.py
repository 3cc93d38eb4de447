"""Trials of edits: a judge, which is any command, runs with one edit in the module's place and has to fail.

Nothing is written where the module lies. The judge's Python processes find the edited text through an import hook
(`judge/sitecustomize.py`, put in front of `PYTHONPATH`), which also tells whether they ever asked for the module: a
judge that cannot see it is refused, as every edit would survive. Before any edit the judge runs once with the text as
it is, has to pass, and says which statements it ran at all; edits of others need no trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from hkv.errors import ConfigError
from hkv.testing.mutation.edits import Edit, edits_of

HOOK = pathlib.Path(__file__).parent / "judge"
"""Folder of the import hook."""

VARIABLE = "HKV_EDITED_SOURCE"
"""Environment variable with the folder that the hook reads; see `judge/sitecustomize.py`."""

BY_CLOCK = 10
"""Seconds by the clock for each second of processor time that a judge may use, as the machine may be busy."""

LONGEST = 160
"""Characters of a judge's last line that are kept."""

Outcome = Literal["killed", "timed out", "survived", "not reached", "not imported"]
"""`not reached`: the judge never runs the statement that the edit is in; `not imported`: it passed without the module,
which it imported for the check."""


@dataclasses.dataclass(frozen=True)
class EditTarget:
    """Source to edit.

    Attributes:
      scope: qualified name of the class or function; "" for all.
      source: text, its lines ended by newlines alone.
    """

    name: str
    path: pathlib.Path
    scope: str
    source: str

    def edits(self) -> list[Edit]:
        """Every edit of it, in order of the text."""
        return edits_of(self.source, self.scope)


def target_of(name: str) -> EditTarget:
    """The source of `MODULE[:CLASS]`, a module by its import name or by the path of its file; ConfigError if there is
    none."""
    module, _, scope = name.partition(":")
    wanted = "a module that can be imported, or the path of a Python file, with :NAME of a class or function behind it"
    if module.endswith(".py"):
        path = pathlib.Path(module)
    else:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # where `python -m` looks first
        try:
            spec = importlib.util.find_spec(module)  # imports the packages around it
        except Exception as error:
            raise ConfigError("module", name, f"{wanted} ({type(error).__name__}: {error})") from None
        if spec is None or not (spec.origin or "").endswith(".py"):
            raise ConfigError("module", name, wanted)
        path = pathlib.Path(str(spec.origin))
    try:
        source = importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeError) as error:
        raise ConfigError("module", name, f"{wanted} ({error})") from None
    return EditTarget(name, path.resolve(), scope, source)


class Verdict(msgspec.Struct, frozen=True):
    """Outcome of one edit.

    Attributes:
      key: `Edit.key`.
      outcome: see `Outcome`.
      status: exit status of the judge, negative for a signal; None if it did not run.
    """

    key: str
    outcome: Outcome
    status: int | None = None
    said: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a judge.

    Attributes:
      reached: lines of the statements that ran, if they were asked for.
    """

    status: int
    said: str
    seconds: float
    seen: bool
    late: bool
    reached: frozenset[int]


class Judge:
    """A command that judges a module: it passes with exit status 0.

    `hkv`, `pytest` and `python` are run by this interpreter. `limit`: seconds of processor time of one run; None for
    five times what the check takes, and 30.
    """

    def __init__(self, target: EditTarget, command: str, limit: float | None) -> None:
        self._target, self._text, self._limit = target, command, limit
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError("--by", command, f"a command line ({error})") from None
        if not words:
            raise ConfigError("--by", command, "a command line")
        own = {"python": [sys.executable], **{name: [sys.executable, "-m", name] for name in ("hkv", "pytest")}}
        self._words = [*own.get(words[0], words[:1]), *words[1:]]
        self._reached: frozenset[int] = frozenset()

    def check(self) -> Run:
        """Runs the judge with the module as it is, which it has to pass, and notes which of its statements it runs."""
        run = self._run(self._target.source, reach=True)
        if run.late:
            raise ConfigError(
                "--by", self._text, f"a judge that ends within --timeout {self._limit:g} on unedited code"
            )
        if run.status != 0:
            raise ConfigError("--by", self._text, f"exit status 0 on unedited code, not {run.status} ({run.said})")
        if not run.seen:
            raise ConfigError("--by", self._text, f"a judge that imports {self._target.path}: it passed without")
        self._limit = self._limit or 5 * run.seconds + 30
        self._reached = run.reached
        return run

    def try_edit(self, edit: Edit) -> Verdict:
        """Runs the judge with one edit in place; without a run if `check` did not reach its statement."""
        if edit.statement not in self._reached:
            return Verdict(edit.key, "not reached")
        run = self._run(edit.applied(self._target.source))
        outcome: Outcome = "killed"
        if run.late:
            outcome = "timed out"
        elif run.status == 0:
            outcome = "survived" if run.seen else "not imported"
        return Verdict(edit.key, outcome, run.status, run.said, round(run.seconds, 2))

    def _run(self, source: str, reach: bool = False) -> Run:
        limit = self._limit or 24 * 3600
        with tempfile.TemporaryDirectory(prefix="hkv-mutate-") as name:
            folder = pathlib.Path(name)
            written = {"module": str(self._target.path), "source": source, "limit": f"{max(1, round(limit))}"}
            for file, text in (written | ({"reached": ""} if reach else {})).items():
                (folder / file).write_text(text, encoding="utf-8", newline="")
            before, output = _used(), folder / "output"
            with output.open("wb") as stream, self._started(folder, stream) as process:
                late = _waited(process, limit * BY_CLOCK)
            seconds = _used() - before
            lines = output.read_text("utf-8", errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "")[:LONGEST]
            late = late or process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU)  # its own, or as a shell says
            reached = frozenset(map(int, (folder / "reached").read_text().split())) if reach else frozenset()
            return Run(process.returncode, said, seconds, (folder / "seen").exists(), late, reached)

    @contextlib.contextmanager
    def _started(self, folder: pathlib.Path, output: object) -> Iterator[subprocess.Popen[bytes]]:
        """The judge in a session of its own, all of which ends with the wait; to be entered on the main thread."""
        paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        # pytest compiles modules of installed plugins itself, from their files, to explain what asserts saw.
        plain = f"--assert=plain {os.environ.get('PYTEST_ADDOPTS', '')}".strip()
        ours = {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(folder), "PYTEST_ADDOPTS": plain}
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=output,  # type: ignore[arg-type]
                stderr=subprocess.STDOUT,
                env=os.environ | ours,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError("--by", self._text, f"a program that can be started ({error.strerror})") from None
        usual = signal.signal(signal.SIGTERM, _leave)  # or the judge would outlive this process
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            signal.signal(signal.SIGTERM, usual)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _waited(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """True if the process is still there after so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _used() -> float:
    """Seconds of processor time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """First line of a state file: verdicts hold for this text and this judge."""

    module: str
    source: str
    by: str


class VerdictFile:
    """Verdicts that outlive the process: one JSON object a line, each written as soon as it is known.

    Without a path nothing is kept, and without a verdict no file is begun. ConfigError if the file was begun for
    another text or judge, or is none of these files.
    """

    def __init__(self, path: pathlib.Path | None, target: EditTarget, command: str) -> None:
        self._path, self.verdicts = path, dict[str, Verdict]()
        self._header = _Header(str(target.path), hashlib.sha256(target.source.encode()).hexdigest(), command)
        if path is None:
            return
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError("--state", str(path), "a file in a folder that exists")
        if not path.exists() or not path.stat().st_size:
            return
        written = path.read_bytes()
        first, *lines = written[: written.rfind(b"\n") + 1].splitlines() or [b""]
        try:
            found = msgspec.json.decode(first, type=_Header)
            self.verdicts = {one.key: one for one in (msgspec.json.decode(line, type=Verdict) for line in lines)}
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ConfigError("--state", str(path), f"a file that this command wrote ({error})") from None
        if not self.verdicts:  # begun by a run whose judge was refused
            os.truncate(path, 0)
            return
        for field, what in (("module", "module"), ("source", "text of the module"), ("by", "judge")):
            if getattr(found, field) != getattr(self._header, field):
                raise ConfigError("--state", str(path), f"a file that was begun for the same {what}")
        if not written.endswith(b"\n"):  # a line that was cut off is judged again
            os.truncate(path, written.rfind(b"\n") + 1)

    def add(self, verdict: Verdict) -> None:
        """Notes a verdict, and writes it."""
        self.verdicts[verdict.key] = verdict
        if self._path is not None:
            with self._path.open("ab") as file:
                for line in (verdict,) if file.tell() else (self._header, verdict):
                    file.write(msgspec.json.encode(line) + b"\n")


def killed(verdicts: Sequence[Verdict]) -> int:
    """Number of edits that the judge noticed."""
    return sum(verdict.outcome in ("killed", "timed out") for verdict in verdicts)

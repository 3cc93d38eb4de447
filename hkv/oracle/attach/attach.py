"""Attaching to live engines, whichever dialect they follow."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import multiprocessing.util
import os
import pathlib
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.attach import Observed, Sink
from hkv.contract.dialect import Dialect
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.oracle.attach.shown import Page
from hkv.oracle.attach.sink import LogFile, LogWriter, RecordSink, ShadowSink
from hkv.oracle.log_file import write_atomically
from hkv.page.live import loopback


def attach(target: Any, settings: AttachSettings | str, dialect: str = registry.DEFAULT) -> tuple[Session, Observed]:
    """Observes one live cache from now on, until the session is closed.

    Args:
      target: the cache, such as vLLM's `KVCacheManager`; it has done nothing yet.
      settings: the settings, or a folder for the logs.
      dialect: name of the dialect whose rules it follows.

    Raises:
      HKVError: it cannot be observed.
    """
    session = Session(settings_of(settings) if isinstance(settings, str) else settings)
    return session, registry.dialect_of(dialect).attach(target, session)


def attach_all(settings: AttachSettings | str) -> Session:
    """Observes every cache that this process makes, of each installed engine that a dialect can observe, and judges the
    calls of each installed store of chunks.
    """
    session = Session(settings_of(settings) if isinstance(settings, str) else settings)
    observed = []
    for dialect in registry.dialects():
        if dialect.attached_package and importlib.util.find_spec(dialect.attached_package) is not None:
            with contextlib.suppress(UnsupportedConfigError):
                dialect.attach_all(session)
                observed.append(dialect.title)
    observed += [judge.package for judge in judge_stores(session)]
    if not observed:
        packages = [dialect.attached_package for dialect in registry.dialects() if dialect.attached_package] + [*STORES]
        told = ", ".join(dict.fromkeys(packages))
        raise ConfigError("attach", None, f"an engine to observe: none of {told} is installed")
    return session


# Live calls that are judged one by one, where a store has no log: which, how often, and the first that is wrong.

STORES = {"lmcache": "hkv.chunks.attach:observe"}
"""Packages whose live calls can be judged, and what hooks into them: it takes a judge and returns what undoes it."""

SHOWN = 240
"""Characters of a value that a report shows."""


class CallError(AssertionError):
    """A live call answered otherwise than HKV's oracle."""


class CallJudge:
    """Compares the answers of live calls with those of HKV's oracle, up to the first `difference`.

    The file at the path says at the end how often each call was `judged`, and the difference, which is raised in the
    caller as well if `raises`. `record` writes a line of what was seen to the file that `write` writes to.
    """

    def __init__(
        self, package: str, path: pathlib.Path, raises: bool, write: Callable[[Any], None] | None = None
    ) -> None:
        self.package, self.judged = package, collections.Counter[str]()
        self.difference: str | None = None
        self._write = write
        self._path, self._raises = path, raises
        self._lock = threading.Lock()
        self._undo: Callable[[], None] | None = None
        self._found: dict[str, Any] | None = None

    def hook(self, observe: Callable[[Any], Callable[[], None]]) -> None:
        """Hooks into the package."""
        self._undo = observe(self)

    def record(self, line: Any) -> None:
        """Writes down what was seen."""
        if self._write is not None:
            self._write(line)

    def judge(self, call: str, arguments: Mapping[str, Any], want: Any, got: Any) -> None:
        """Compares two answers."""
        with self._lock:
            if self.difference is not None:
                return
            self.judged[call] += 1
            if want == got:
                return
            said = ", ".join(f"{name} = {_short(value)}" for name, value in arguments.items())
            self.difference = f"{self.package}: {call} of {said}: {_short(got)}, expected {_short(want)}"
            self._found = {"call": call, "arguments": dict(arguments), "want": want, "got": got}
        print(f"hkv: {self.difference}", file=sys.stderr, flush=True)
        if self._raises:
            raise CallError(self.difference)

    def close(self) -> None:
        """Leaves the package as it was, and writes the file."""
        if self._undo is None:
            return
        self._undo()
        self._undo = None
        document = {"package": self.package, "judged": dict(self.judged), "difference": self._found}
        encoded = msgspec.json.encode(document, enc_hook=str)
        write_atomically(str(self._path), msgspec.json.format(encoded, indent=2) + b"\n")


def judge_stores(session: Session) -> list[CallJudge]:
    """Has the calls of every installed store judged, until the session ends."""
    judges = []
    for package, place in STORES.items():
        if importlib.util.find_spec(package) is not None:
            module, _, attribute = place.partition(":")
            judge = session.judge(package)
            observe = getattr(importlib.import_module(module), attribute)
            judge.hook(lambda made, observe=observe: observe(made.judge))
            judges.append(judge)
    return judges


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# All live caches that one process observes: their files, the thread that writes them, and those left out.
#
# A process may be forked with a session in it, as vLLM's engine core is by default. The child goes on with a session of
# its own: a new writing thread, files named after itself, and its own line if its parent said one. Caches that the
# parent made stay the parent's.


class Session:
    """Observation in one process; ends with it.

    Args:
      settings: the settings.

    Attributes:
      settings: as given.
      states, share, tensors: those of `settings`.
      shadows: the sinks of mode `shadow`, in order.
      label: beginning of the names of the logs that come; may be set anew.
    """

    def __init__(self, settings: AttachSettings) -> None:
        self.settings = settings
        self.states, self.share, self.tensors = settings.states, settings.share, settings.tensors
        self.shadows: list[ShadowSink] = []
        self.label = ""
        self._folder = pathlib.Path(settings.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = LogWriter()
        self._count = 0
        self._observed: list[Observed] = []
        self._lasting: list[Observed] = []
        self._recorded: list[RecordSink] = []
        self._subject = ""
        self._page = Page(settings.serve, settings.engine)
        self._closed = False
        atexit.register(self.close)
        self._end_with_process()
        # A process of `multiprocessing` ends without `atexit`, and forgets what is to be done at its end as it begins.
        multiprocessing.util.register_after_fork(self, Session._end_with_process)
        begun = weakref.WeakMethod(self._begin_in_child)
        os.register_at_fork(after_in_child=lambda: (begin := begun()) and begin())

    def _end_with_process(self) -> None:
        multiprocessing.util.Finalize(self, self.close, exitpriority=0)

    def _begin_in_child(self) -> None:
        if self._closed:
            return
        self._writer.restart()
        for sink in self._recorded:
            sink.let_go()
        self._recorded = []
        for shadow in self.shadows:
            shadow.let_go()
        self.shadows = []
        self._page.let_go()
        for observed in self._observed:
            observed.close()
            self.refuse(type(observed).__name__, "made before this process was forked: its parent observes it")
        self._observed = []
        if self._subject:
            # In the writing thread: a thread of the parent may have held the lock of standard error at the fork.
            self._writer.put(self._say)

    def say(self, subject: str) -> None:
        """Says in one line on standard error what becomes of caches in this process, as will every fork of it; the
        subject is such as "vLLM's cache managers".
        """
        self._subject = subject
        self._say()

    def _say(self) -> None:
        form = "recorded to"
        if self.settings.mode == "shadow":
            form = f"held against engine {self.settings.engine}, differences go to"
        share = f", each with probability {self.settings.share:g}" if self.settings.share < 1 else ""
        place = self._folder.absolute()
        say(f"{self._subject} are {form} {place}{share} (process {os.getpid()})")

    def draws(self) -> bool:
        """True if the cache that is being made is one of the share that is observed."""
        # Never from `random`, whose state is the observed engine's, and which forked processes would share.
        return secrets.randbelow(1 << 53) < self.settings.share * (1 << 53)

    def sink(self, dialect: Dialect) -> Sink:
        """Sink for the operations of the next cache."""
        self._count += 1
        suffix = f".{self.settings.compression}" if self.settings.compression else ""
        path = self._folder / f"{self.label or os.getpid()}-{self._count}.jsonl{suffix}"
        if self.settings.mode == "record":
            recorded = RecordSink(LogFile(path, dialect, self.settings.part_bytes), self._writer)
            self._recorded.append(recorded)
            return recorded
        raises = self.settings.on_difference == "raise"
        shadow = ShadowSink(path.with_suffix("") if suffix else path, self.settings.engine, raises)
        self.shadows.append(shadow)
        self._page.add(shadow.shown)
        return shadow

    def path(self, name: str) -> pathlib.Path:
        """Path of a file of this process in the session's folder."""
        return self._folder / f"{self.label or os.getpid()}-{name}"

    def judge(self, subject: str) -> CallJudge:
        """Judge of live calls about a subject, until the session ends: `SUBJECT.json`, and lines in `SUBJECT.jsonl`."""

        def write(line: Any) -> None:
            data = msgspec.json.encode(line, enc_hook=str) + b"\n"
            self._writer.put(lambda: _append(self.path(f"{subject}.jsonl"), data))

        raises = self.settings.on_difference == "raise"
        made = CallJudge(subject, self.path(f"{subject}.json"), raises, write)
        self.observe_to_the_end(made)
        return made

    def observe(self, observed: Observed) -> None:
        """Remembers a cache under observation, to close it at the end."""
        self._observed.append(observed)

    def observe_to_the_end(self, observed: Observed) -> None:
        """Remembers what is closed when the session ends, and not before."""
        self._lasting.append(observed)

    def refuse(self, what: str, reason: str) -> None:
        """Notes a cache that cannot be observed, and why, in `refused.txt`."""
        line = f"{self.label or os.getpid()}\t{what}\t{' '.join(reason.split())}\n"
        self._writer.put(lambda: _append(self._folder / "refused.txt", line.encode()))

    def flush(self) -> None:
        """Waits until everything noted so far is written, but for the last calls of each cache."""
        self._writer.flush()

    def close_all(self) -> None:
        """Ends the observation of every cache so far, and waits until their logs are written."""
        for observed in list(self._observed):
            observed.close()
        self._observed.clear()
        self._writer.flush()

    def close(self) -> None:
        """Ends the session; raises the error that kept a log from being written."""
        atexit.unregister(self.close)
        if self._closed:
            return
        self._closed = True
        self.close_all()
        for observed in self._lasting:
            observed.close()
        self._page.close()
        self._writer.close()
        if self._writer.problem is not None:
            raise self._writer.problem


def _append(path: pathlib.Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def say(text: str) -> None:
    """Says something to whoever runs the observed engine, in one line on standard error."""
    print(f"hkv: {text}", file=sys.stderr, flush=True)


# Settings of an attachment, and their text in the environment variable that carries them into a server's processes.

VARIABLE = "HKV_ATTACH"
"""Environment variable that switches observation on: the folder of the logs, or settings as a JSON object."""

MODES = ("record", "shadow")
COMPRESSIONS = ("", "gz", "zst")
STATES = ("none", "end", "digest", "step", "all")
REACTIONS = ("report", "raise")
TENSORS = ("none", "start", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """Form in which live engines are observed.

    Attributes:
      folder: folder of the logs; made if it is not there.
      mode: `record`, which writes a log of each cache; `shadow`, which performs its operations on another engine, too,
        and writes a log up to the first difference, if there is one.
      engine: name of the engine alongside it, in mode `shadow`.
      on_difference: `report` it, on standard error, or `raise` in the observed engine's own call.
      share: probability with which a cache is observed, drawn as it is made, where all of a process are; one that is
        not costs nothing.
      states: the states that are written: `none`, `end` when it ends, `digest` every 64 calls as well, at every
        `step`, or after `all` operations, which also says what changed between two.
      tensors: what a worker's tensors are held to: nothing (`none`), the plan as they are made (`start`), or the
        manager's rows in each `step` as well, for which the engine waits for its device.
      compression: `gz`, `zst`, or none.
      part_bytes: bytes of a log, before compression, after which its next part begins; None for one part.
      serve: `HOST:PORT` of this machine, where a page shows what caches of mode `shadow`, and the engines beside them,
        are going through; none for "". Standard error says its whole address, which has a token.
    """

    folder: str
    mode: str = "record"
    engine: str = "numpy"
    on_difference: str = "report"
    share: float = 1.0
    states: str = "end"
    tensors: str = "start"
    compression: str = ""
    part_bytes: int | None = None
    serve: str = ""

    def __post_init__(self) -> None:
        choices = {"mode": MODES, "compression": COMPRESSIONS, "states": STATES, "on_difference": REACTIONS}
        choices["tensors"] = TENSORS
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    name, getattr(self, name), f"one of {', '.join(value or '(none)' for value in values)}"
                )
        if not self.folder:
            raise ConfigError("folder", self.folder, "a folder for the logs")
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise ConfigError("share", self.share, "a probability above 0, 1 at most")
        if self.part_bytes is not None and (type(self.part_bytes) is not int or self.part_bytes < 1):
            raise ConfigError("part_bytes", self.part_bytes, "a positive number of bytes")
        if self.serve and self.mode != "shadow":
            raise ConfigError("serve", self.serve, "mode shadow, in which an engine is there to be looked at")
        if self.serve:
            loopback(self.serve)

    def variable(self) -> str:
        """Text of the settings for `VARIABLE`; the folder is made absolute."""
        fields = dataclasses.asdict(self) | {"folder": str(pathlib.Path(self.folder).absolute())}
        return msgspec.json.encode(fields).decode()


def settings_of(text: str) -> AttachSettings:
    """The settings that a text stands for: a folder, or a JSON object of `AttachSettings`."""
    if not text.lstrip().startswith("{"):
        return AttachSettings(folder=text)
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        return AttachSettings(**fields)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(VARIABLE, text, f"a folder, or settings as a JSON object ({error})") from None


def settings_from(environment: Mapping[str, str] = os.environ) -> AttachSettings | None:
    """The settings that an environment asks for; None where it asks for no observation."""
    text = environment.get(VARIABLE, "")
    return settings_of(text) if text else None

"""All live caches that one process observes: their files, the thread that writes them, and those left out.

A process may be forked with a session in it, as vLLM's engine core is by default. The child goes on with a session of
its own: a new writing thread, files named after itself, and its own line if its parent said one. Caches that the
parent made stay the parent's.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import pathlib
import secrets
import sys
import weakref

from hkv.contract.attach import Observed, Sink
from hkv.contract.dialect import Dialect
from hkv.oracle.attach.settings import AttachSettings
from hkv.oracle.attach.sink import RecordSink, ShadowSink
from hkv.oracle.attach.writer import LogFile, LogWriter


class Session:
    """Observation in one process; ends with it.

    Args:
      settings: the settings.

    Attributes:
      settings: as given.
      states, share: those of `settings`.
      shadows: the sinks of mode `shadow`, in order.
      label: beginning of the names of the logs that come; may be set anew.
    """

    def __init__(self, settings: AttachSettings) -> None:
        self.settings = settings
        self.states, self.share = settings.states, settings.share
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
        for observed in self._observed:
            observed.close()
            self.refuse(type(observed).__name__, "made before this process was forked: its parent observes it")
        self._observed = []
        if self._subject:
            # In the writing thread: a thread of the parent may have held the lock of standard error at the fork.
            self._writer.put(self._say)

    def say(self, subject: str) -> None:
        """Says in one line on standard error what becomes of caches in this process, as will every fork of it.

        Args:
          subject: whose caches, such as "vLLM's cache managers".
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
        shadow = ShadowSink(path.with_suffix("") if suffix else path, self.settings)
        self.shadows.append(shadow)
        return shadow

    def path(self, name: str) -> pathlib.Path:
        """Path of a file of this process in the session's folder."""
        return self._folder / f"{self.label or os.getpid()}-{name}"

    def observe(self, observed: Observed) -> None:
        """Remembers a cache under observation, to close it at the end."""
        self._observed.append(observed)

    def observe_to_the_end(self, observed: Observed) -> None:
        """Remembers what is closed when the session ends, and not before."""
        self._lasting.append(observed)

    def refuse(self, what: str, reason: str) -> None:
        """Notes a cache that cannot be observed, and why, in `refused.txt`."""
        line = f"{self.label or os.getpid()}\t{what}\t{' '.join(reason.split())}\n"
        path = self._folder / "refused.txt"

        def note() -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)

        self._writer.put(note)

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
        """Ends the session.

        Raises:
          Exception: the error that kept a log from being written.
        """
        atexit.unregister(self.close)
        if self._closed:
            return
        self._closed = True
        self.close_all()
        for observed in self._lasting:
            observed.close()
        self._writer.close()
        if self._writer.problem is not None:
            raise self._writer.problem


def say(text: str) -> None:
    """Says something to whoever runs the observed engine, in one line on standard error."""
    print(f"hkv: {text}", file=sys.stderr, flush=True)

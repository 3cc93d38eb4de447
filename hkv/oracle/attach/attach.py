"""Attaching to live engines, whichever dialect they follow."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.attach import Observed
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.oracle.attach.session import Session
from hkv.oracle.attach.settings import AttachSettings, settings_of
from hkv.oracle.log_file import write_atomically


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

    Raises:
      ConfigError: there is no such engine.
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
        raise ConfigError("attach", None, f"an engine to observe: none of {', '.join(packages)} is installed")
    return session


# Live calls that are judged one by one, where a store has no log: which, how often, and the first that is wrong.

STORES = {"lmcache": "hkv.chunks.attach:observe"}
"""Packages whose live calls can be judged, and what hooks into them: it takes a judge and returns what undoes it."""

SHOWN = 240
"""Characters of a value that a report shows."""


class CallError(AssertionError):
    """A live call answered otherwise than HKV's oracle."""


class CallJudge:
    """Compares the answers of live calls with those of HKV's oracle, up to the first difference.

    Args:
      package: whose calls they are.
      path: the file that is written at the end: how often each call was judged, and the first difference.
      raises: whether a difference is raised in the caller, besides being reported.

    Attributes:
      judged: number of calls judged, by name.
      difference: the first difference in words, or None.
    """

    def __init__(self, package: str, path: pathlib.Path, raises: bool) -> None:
        self.package, self.judged = package, collections.Counter[str]()
        self.difference: str | None = None
        self._path, self._raises = path, raises
        self._lock = threading.Lock()
        self._undo: Callable[[], None] | None = None
        self._found: dict[str, Any] | None = None

    def hook(self, observe: Callable[[Callable[..., None]], Callable[[], None]]) -> None:
        """Hooks into the package."""
        self._undo = observe(self.judge)

    def judge(self, call: str, arguments: Mapping[str, Any], want: Any, got: Any) -> None:
        """Compares two answers.

        Raises:
          CallError: they differ, no call has before, and differences are raised.
        """
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
            judge = CallJudge(package, session.path(f"{package}.json"), session.settings.on_difference == "raise")
            judge.hook(getattr(importlib.import_module(module), attribute))
            session.observe_to_the_end(judge)
            judges.append(judge)
    return judges


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

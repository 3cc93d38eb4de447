"""The newest operations of a live cache, for a page that somebody looks at.

Nothing is kept, and the engine alongside the cache is asked for nothing more, until a page asks. From then on each
operation is kept with both answers, in the cache's own thread, and how the blocks are whenever a tenth of its time has
not yet gone into looking at them. What is kept is bounded: the newest operations, texts and changes of blocks; where
the page has not asked for `IDLE` seconds, nothing again. After a difference nothing more is performed; a page that is
opened then shows the operations before it, performed once more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.attach import beside
from hkv.errors import ConfigError
from hkv.oracle.check import Difference
from hkv.oracle.engine import attempt, make_engine
from hkv.oracle.history import Mark, case_data, difference_mark, operation_text, subject
from hkv.oracle.side import EngineSide, look_of
from hkv.page.live import MOST, Live

IDLE = 10.0
"""Seconds after which a page that has not asked is gone."""

REST = 9.0
"""Seconds for which the blocks are not looked at, for each second that a look took."""

TEXT = 4_000_000
"""Characters of operations that are kept."""

MOST_SHOWN = 4
"""Caches that a page shows, the newest."""

CHANGES = 200_000
"""Changes of blocks that are kept, besides those that the first operation finds."""

QUEUED = 300_000
"""Entries of free queues that are kept."""

LIVE = "live"
"""Name of the cache's own side."""


class Page:
    """The page of a process's caches, served from the first one on; an `address` of "" is that of no page."""

    def __init__(self, address: str, engine: str) -> None:
        self._address, self._engine = address, engine
        self._live: Live | None = None
        self._shown: list[Shown] = []

    def add(self, shown: Shown) -> None:
        """Adds the newest cache; an address that is taken is said, and leaves the caches as they are."""
        if not self._address:
            return
        self._shown = [*self._shown, shown][-MOST_SHOWN:]
        if self._live is None:
            title = f"hkv: caches of process {os.getpid()}, beside engine {self._engine}"
            try:
                self._live = Live(self._address, title, lambda: {"title": title, "cases": self._cases()})
            except ConfigError as error:
                print(f"hkv: no live page: {error}", file=sys.stderr, flush=True)
                self._address = ""
            else:
                self._live.__enter__()

    def _cases(self) -> list[dict[str, Any]]:
        return [case for case in [shown.data() for shown in self._shown] if case is not None]

    def let_go(self) -> None:
        """Leaves the page and the caches to the parent, in a forked process."""
        if self._live is not None:
            self._live.let_go()
        self._live, self._shown = None, []

    def close(self) -> None:
        """Ends the page."""
        if self._live is not None:
            self._live.__exit__(None, None, None)
        self._address, self._live = "", None


class Shown:
    """The newest operations of one cache under observation, and of the engine alongside.

    Args:
      name: name of the cache.
      engine: name of the engine alongside.
      factory: makes one like it.

    Attributes:
      lock: held while the engine performs, since a page may look at it from another thread.
    """

    def __init__(self, name: str, engine: str, factory: EngineFactory) -> None:
        self._name, self._engine_name, self._factory = name, engine, factory
        self.lock = threading.Lock()
        self._header: Any = None
        self._engine: Any = None
        self._sides: tuple[EngineSide, EngineSide] | None = None
        self._lines: list[str] = []
        self._subjects: list[str] = []
        self._performed = self._characters = self._given = self._begun = 0
        self._asked = self._next = 0.0
        self._found: tuple[Sequence[Any], Any] | None = None
        self._marks: tuple[Mark, ...] = ()

    def begin(self, header: Any, engine: Any) -> None:
        """The cache's configuration, and the engine alongside."""
        self._header, self._engine = header, engine

    def operation(self, operation: Any, answer: Any, want: Any) -> None:
        """Takes an operation, the cache's answer, and that of the engine; the caller holds the lock."""
        self._performed += 1
        if self._sides is None:
            return
        now = time.monotonic()
        if now - self._asked > IDLE:
            self._drop()
            return
        self._take(operation, answer, want)
        if now >= self._next:
            self._look()
            self._next = time.monotonic() + REST * (time.monotonic() - now)
        self._trim()

    def differs(self, performed: Sequence[Any], answer: Any, difference: Difference) -> None:
        """The last operation's answers differ, and no other follows; the caller holds the lock."""
        self._found = (performed, answer)
        pair = (LIVE, self._engine_name)
        self._marks = (difference_mark(difference.line, difference.field, difference.want, difference.got, pair),)
        if self._sides is not None:
            self._look()

    def close(self) -> None:
        """No operation follows; what is kept may still be shown."""
        self._engine = self._found = None

    def data(self) -> dict[str, Any] | None:
        """Data of a case of a page; None where there is nothing to show."""
        with self.lock, beside():
            self._asked = time.monotonic()
            if self._sides is None and not self._start():
                return None
            assert self._sides is not None
            sides = tuple(side.copied() for side in self._sides)
            lines, subjects, first = list(self._lines), list(self._subjects), self._given
        said = f"operations {first + 1:,} to {first + len(lines):,}" if lines else f"after {first:,} operations"
        said += f": {'the last one differs' if self._marks else 'none differs'}"
        said += "" if self._engine is not None else "; the cache has ended"
        looks = len(sides[1].looks) - 1
        said += f"; blocks were looked at after {looks:,} of them" if looks < len(lines) else ""
        return case_data(
            self._name,
            self._header,
            lines,
            subjects,
            sides,
            headline=said,
            first=first,
            differing=[len(lines) - 1] * len(self._marks),
            marks=self._marks,
        )

    def _start(self) -> bool:
        """Begins to keep what comes, or performs once more what came before a difference; False once all has ended."""
        if self._engine is None:
            return False
        if self._found is not None:
            self._replay(*self._found)
        else:
            self._begin_at(self._performed, self._engine)
        return True

    def _replay(self, performed: Sequence[Any], answer: Any) -> None:
        engine, dialect = make_engine(self._factory, self._header), registry.dialect_of(self._header.dialect)
        first = max(0, len(performed) - MOST // 2)
        for operation in performed[:first]:
            attempt(dialect, engine, operation)
        self._begin_at(first, engine)
        for number, operation in enumerate(performed[first:], first + 1):
            want = attempt(dialect, engine, operation)
            self._take(operation, answer if number == len(performed) else want, want)
            self._look()
            self._trim()

    def _begin_at(self, first: int, engine: Any) -> None:
        self._given = first
        self._sides = (self._side(LIVE, None), self._side(self._engine_name, engine))
        self._look()
        self._begun = self._sides[1].size

    def _side(self, name: str, engine: Any) -> EngineSide:
        made = EngineSide(registry.dialect_of(self._header.dialect), self._header, name, engine, whole=0, queued=QUEUED)
        made.first = self._given
        return made

    def _take(self, operation: Any, answer: Any, want: Any) -> None:
        assert self._sides is not None
        live, beside = self._sides
        index = len(self._lines)
        self._lines.append(operation_text(operation))
        self._subjects.append(subject(operation))
        self._characters += len(self._lines[-1])
        live.is_told(index, operation, answer)
        beside.takes(index, want)

    def _look(self) -> None:
        assert self._sides is not None
        self._sides[1].look(len(self._lines), look_of(registry.dialect_of(self._header.dialect)))

    def _trim(self) -> None:
        """Forgets the older half of what is kept, once that is more than it may be."""
        assert self._sides is not None
        changes = sum(side.size for side in self._sides)
        if len(self._lines) <= MOST and self._characters <= TEXT and changes <= self._begun + CHANGES:
            return
        gone = (len(self._lines) + 1) // 2
        for side in self._sides:
            side.forget(gone)
        del self._lines[:gone], self._subjects[:gone]
        self._given += gone
        self._characters = sum(map(len, self._lines))
        self._begun = sum(side.size for side in self._sides)

    def _drop(self) -> None:
        self._sides = None
        self._lines, self._subjects, self._characters = [], [], 0

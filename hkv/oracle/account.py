"""The account of a failing case that commands and tests give alike: lines of text, a log, a page, a command.

Lines say what is broken, how, what was promised, and the operations that lead there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Failure
from hkv.contract.case import Case
from hkv.contract.log import describe
from hkv.limits import counted
from hkv.oracle.broken_invariant import Broken, FoundTraffic
from hkv.oracle.engine import attempt
from hkv.oracle.history import Engines, history, invariant_mark
from hkv.oracle.log_file import log_bytes, write_atomically
from hkv.oracle.shrink import LoneShrinker, Shrinker

MOST = 20
"""Operations of a case that are told; of a longer one, the last."""


def lines_of(
    header: Any, operations: Sequence[Any], broken: Broken | str, whole: int = 0, differing: int | None = None
) -> list[str]:
    """Lines about an invariant that is broken, and the operations that lead there, of `whole` before shrinking.

    After the first `differing` of them, the engine in doubt goes on by itself.
    """
    lines = [f"  broken invariant: {broken if isinstance(broken, str) else broken.name}"]
    if isinstance(broken, Broken):
        lines += [f"    line {broken.line}, {broken.problem}", f"    promised: {broken.promise}"]
    if operations:
        cache = registry.dialect_of(header.dialect).summary(header)
        shrunk = f", shrunk from {whole}" if whole > len(operations) else ""
        lines.append(f"  {counted(len(operations), 'operation')}{shrunk}, on {cache}:")
        first = max(0, len(operations) - MOST)
        if first:
            lines.append(f"    ... {first} more before these")
        for index in range(first, len(operations)):
            lines.append(f"    {index + 2:>4}: {describe(operations[index], plain=True)}")
            if differing is not None and index + 1 == differing < len(operations):
                lines.append("          from here on the engine in doubt follows its own answers")
    return lines


# An engine by itself, that broke an invariant.


def small(
    factory: EngineFactory, found: FoundTraffic, shrink: Callable[[Shrinker, Case], Case] = Shrinker.shrink
) -> FoundTraffic:
    """The same on as few operations, tokens and blocks as still break it."""
    return LoneShrinker(factory, found.broken.name).found(found, shrink)


def told(found: FoundTraffic) -> list[str]:
    """Lines about traffic under which an engine broke an invariant, the seed and the invariant first."""
    first = f"{found.name}: {found.broken.name}: {' '.join(found.broken.problem.split())}"
    return [first, *lines_of(found.header, found.operations, found.broken, found.whole)]


def write_log_of(path: str | os.PathLike[str], factory: EngineFactory, found: FoundTraffic) -> None:
    """Writes the operations as a log, with the engine's own answers; without one where it gives none."""
    dialect, engine = registry.dialect_of(found.header.dialect), factory(found.header)
    answers = [attempt(dialect, engine, operation) for operation in found.operations]
    lines = log_bytes(found.header, found.operations, [None if isinstance(each, Failure) else each for each in answers])
    write_atomically(path, lines)


def page_of(found: FoundTraffic, engines: Engines, log: str = "") -> dict[str, Any]:
    """Data of a page of the case, on the engine alone."""
    mark = invariant_mark(registry.dialect_of(found.header.dialect), found.broken, engines[0][0])
    headline = f"{found.broken.name}: {found.broken.problem}"
    again = {"finds it again": repeated(engines[0][0], found, log)}
    settings: dict[str, Any] = {"headline": headline, "commands": again}
    return history(found.name, found.header, found.operations, engines, marks=(mark,), explained=False, **settings)


def repeated(engine: str, found: FoundTraffic, log: str = "") -> str:
    """Command that drives an engine through the case again, of a log where it was saved, else of the seed."""
    if log or found.seed is None:
        return command("watch", engine, "--log", log or found.feature)
    traffic = ("--dialect", found.header.dialect, "--feature", found.feature, "--version", found.version)
    return command("watch", engine, *traffic, "--first-seed", found.seed, "--seeds", 1)


def command(*words: object) -> str:
    """A command of HKV's, as a shell reads it."""
    return shlex.join(["hkv", *map(str, words)])

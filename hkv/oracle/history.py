"""History of every block under some operations, on one engine or on several side by side: what a page shows.

Engines perform the operations in lock-step and are asked for their `state` after each (`hkv.oracle.side` keeps what
changed). A log's own states are a side too, looked at where the log has them. Where operations times blocks are too
many for a look after each, one is made after every n-th operation, and the page says so; answers are never left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, failure_of
from hkv.contract.dialect import Dialect
from hkv.contract.log import Log, answer_type
from hkv.errors import HKVError, UnsupportedConfigError
from hkv.oracle.broken_invariant import Broken
from hkv.oracle.engine import compare, make_engine
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.side import EngineSide, look_of, looks_apart
from hkv.oracle.verbs import explain

EXPLAINED = 8_000
"""Operations that the reference performs for explanations, each of which begins at the first line."""

COPIED, LEAST = 100_000, 12
"""Bytes of a log from which a page has no text of it to copy, and the fewest that an operation takes there."""

_LONG = re.compile(r"\[((?:\d+, ){20})(?:\d+, )+(\d+)\]")
"""A list of more than 22 numbers; the first twenty and the last are shown, the answers themselves are whole."""

Engines: TypeAlias = Sequence[tuple[str, EngineFactory]]
"""Engines by name; of two, the first is in doubt and the second counts."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """An operation to which a page leads at once.

    Attributes:
      line: line of the log; 1 for the configuration.
      kind: `difference`, `invariant` or `line`.
      title: in a few words; `text`: the rest, a line each.
    """

    line: int
    kind: str
    title: str
    text: tuple[str, ...] = ()


def difference_mark(line: int, field: str, want: Any, got: Any, sides: tuple[str, str]) -> Mark:
    """Mark at the first difference of two sides: the one in doubt, and the one that counts."""
    text = tuple(
        _LONG.sub(r"[\1..., \2]", f"{side}: {value}") for side, value in zip(reversed(sides), (want, got), strict=True)
    )
    return Mark(line, "difference", f"first difference: {field}", text)


def invariant_mark(dialect: Dialect, broken: Broken, engine: str) -> Mark:
    """Mark at the first invariant that an engine breaks, with the rule behind it."""
    rule = dialect.invariants.get(broken.name)
    promises = f" ({', '.join(rule.promises)})" if rule and rule.promises else ""
    said = broken.promise if rule is None else rule.promise
    text = (
        broken.problem,
        f"promised by {dialect.title}'s rules{promises}: {said}",
        "docs/tables/invariants.md lists all rules",
    )
    return Mark(broken.line, "invariant", f"{engine} breaks: {broken.name}", text)


def history(
    name: str,
    header: Any,
    operations: Sequence[Any],
    engines: Engines,
    *,
    recorded: str = "",
    ids: str = "exact",
    marks: Sequence[Mark] = (),
    headline: str = "",
    commands: Mapping[str, str] | None = None,
    text: bytes = b"",
    path: str = "",
    explained: bool = True,
    log: Log | None = None,
    drawn: EngineSide | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Data of a page: the operations, and on every engine the answers and the history of each block.

    Args:
      name: title of the case.
      header: the configuration.
      operations: the operations.
      engines: their names and factories; of two, the first is in doubt and the second counts.
      recorded: name under which the operations' own answers and states are a side as well; "" for none.
      ids: comparison of block ids, as of `Dialect.renaming`.
      marks: operations to which the page leads.
      headline: sentence under the title.
      commands: commands that repeat what is shown, by what they do.
      text: the case as a log, to copy.
      path: the log's file, of whose lines `hkv explain` tells more; "" for none.
      explained: whether requests are explained, by the reference, wherever operations name one.
      log: the case where it was read as a log, which is `text` then.
      drawn: side of the only engine, if it has performed the operations already.
      progress: called after each operation.

    Returns:
      Plain values and NumPy columns, as `hkv.page` packs them.

    Raises:
      UnsupportedConfigError: the dialect cannot describe its states.
    """
    dialect = registry.dialect_of(header.dialect)
    look = look_of(dialect)
    made = () if drawn is not None else engines
    sides = [EngineSide(dialect, header, each, make_engine(factory, header)) for each, factory in made]
    told = EngineSide(dialect, header, recorded, None) if recorded else None
    every = looks_apart(len(operations), header)
    near = {mark.line - 2 + offset for mark in marks for offset in (-1, 0, 1)}
    differing = list[int]()
    names = dialect.renaming(ids, header)

    def both(operation: Any) -> tuple[Any, Any]:
        return sides[-1].attempt(operation), sides[0].attempt(operation)

    for side in sides:
        side.look(0, look)
    for index, operation in enumerate(operations if drawn is None else ()):
        if told is not None:
            told.is_told(index, operation, getattr(operation, "want", None))
        own = names.operation(operation, both) if len(sides) > 1 else operation
        going = not any(side.ended for side in sides)
        given = [side.perform(index, own if side is sides[0] else operation) for side in sides]
        want = getattr(operation, "want", None) if told is not None else given[-1]
        if sides and going and _differ(dialect, want, names.answer(want, given[0]), sides, header):
            differing.append(index)
        if len(sides) > 1:
            names.learn(operation, both)
        if index % every == every - 1 or index in near or index == len(operations) - 1:
            for side in sides:
                side.look(index + 1, look)
        progress()
    all_sides = [each for each in (told, drawn, *sides) if each is not None]
    if log is None and explained:
        log = parse_log(text or log_bytes(header, operations, _wants(operations, sides)), name)
    elif log is not None and len(operations) < COPIED // LEAST:
        text = log_bytes(header, operations, [getattr(each, "want", None) for each in operations])
    return case_data(
        name,
        header,
        [operation_text(operation) for operation in operations],
        [subject(operation) for operation in operations],
        all_sides,
        differing=differing,
        marks=marks,
        headline=headline,
        path=path,
        every=every,
        explanations=_explanations(log, marks) if log is not None and explained else {},
        commands=[{"what": what, "command": command} for what, command in (commands or {}).items()],
        text=text.decode() if len(text) < COPIED else "",
    )


def case_data(
    name: str,
    header: Any,
    operations: Sequence[str],
    subjects: Sequence[str],
    sides: Sequence[EngineSide],
    *,
    differing: Sequence[int] = (),
    marks: Iterable[Mark] = (),
    **more: Any,
) -> dict[str, Any]:
    """Data of one case of a page.

    Args:
      name: title of the case.
      header: the configuration.
      operations: texts of the operations.
      subjects: requests that they are about.
      sides: engines, or what was told.
      differing: operations whose answers differ.
      marks: operations to which the page leads.
      **more: values in place of those for none.
    """
    dialect = registry.dialect_of(header.dialect)
    given = {"headline": "", "path": "", "first": 0, "every": 1, "explanations": {}, "commands": [], "text": ""}
    return {
        **given,
        **more,
        "name": name,
        "dialect": dialect.title,
        "summary": dialect.summary(header),
        "header": msgspec.to_builtins(header),
        "groups": [{"kind": kind, "size": size} for kind, size in dialect.groups(header)],
        "pools": next((side.pools for side in sides if side.pools), []),
        "operations": "\n".join(operations),
        "subjects": list(subjects),
        "sides": [side.record(len(operations)) for side in sides],
        "differing": np.array(differing, np.int32),
        "marks": [dataclasses.asdict(mark) for mark in sorted(marks, key=lambda mark: mark.line)],
    }


def _differ(dialect: Dialect, want: Any, got: Any, sides: Sequence[EngineSide], header: Any) -> bool:
    """True if two answers differ in what all engines have."""
    lacks = frozenset[str]().union(*(side.lacks for side in sides))
    return compare(dialect, want, got, header.oplog, lacks) is not None


def operation_text(operation: Any) -> str:
    """An operation without its answer, on one line of JSON."""
    fields = msgspec.to_builtins(operation)
    fields.pop("want", None)
    return msgspec.json.encode(fields).decode()


def subject(operation: Any) -> str:
    """The request that an operation is about; "" for none."""
    return str(getattr(operation, "id", "") or "")


def _wants(operations: Sequence[Any], sides: Sequence[EngineSide]) -> list[Any]:
    """Answers that a log of the operations needs: the recorded ones, or those of the side that counts."""
    if all(getattr(each, "want", None) is not None for each in operations if answer_type(type(each)) is not None):
        return [getattr(each, "want", None) for each in operations]
    return sides[-1].given


# Accounts of requests, in `hkv explain`'s words.


def _explanations(log: Log, marks: Iterable[Mark]) -> dict[str, Any]:
    """Accounts of the requests that lines name, by line: of all, or of the last ones before a mark and the end."""
    found: dict[str, Any] = {}
    left = EXPLAINED
    lines = [index + 2 for index, operation in enumerate(log.operations) if getattr(operation, "id", None)]
    ends = [mark.line for mark in marks] or [len(log.operations) + 1]
    answered = {line for line in lines if answer_type(type(log.operations[line - 2])) is not None}
    for line in sorted(lines, key=lambda line: min(abs(end - line) + 10**6 * (line > end) for end in ends)):
        if line not in ends and line not in answered:
            continue
        if left < line:
            break
        left -= line
        try:
            found[str(line)] = msgspec.to_builtins(explain(log, line))
        except UnsupportedConfigError:
            return {}
        except HKVError as error:
            found[str(line)] = {"refused": str(error)}
        except Exception as error:  # a case may stop where the reference cannot follow
            found[str(line)] = {"refused": failure_of(error).message}
    return found

"""Account of a request and its blocks up to a line of a log, and of why its hit is not longer; dialects give it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hkv.contract.log import Log, describe
from hkv.errors import ConfigError, FileError

Event: TypeAlias = tuple[int, str]
"""A line of the log, and what happened there."""


@dataclasses.dataclass(frozen=True)
class MissingEntry:
    """An entry of the cache that a group would have to have.

    Attributes:
      first: first token that it would hold; of a recurrent state, the first that it depends on.
      last: the last one.
      why: reason why it is missing, and since when.
      block: the block that had it and lost it, or None.
    """

    first: int
    last: int
    why: str
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class Resumption:
    """Boundaries at which one group alone could resume a request.

    Attributes:
      group: the group.
      kind: its kind.
      block_size: tokens in its block.
      largest: the largest boundary, in tokens.
      next: the next boundary that a hit may have, in tokens; None when no longer hit is possible.
      lacks: entries that the group lacks for that one; empty where it lacks nothing.
    """

    group: int
    kind: str
    block_size: int
    largest: int
    next: int | None
    lacks: tuple[MissingEntry, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Account of one line of a log.

    Attributes:
      line: the line.
      operation: the operation there.
      answer: the reference's answer to it, in words.
      departed: the first line, up to this one, at which the log's answer is not the reference's, or None.
      differs: the first difference between the two answers to the line itself, in words; "" if they agree.
      request: the request; "" where none is there, and what follows is empty.
      situation: its state before the line, in words.
      events: operations on it, and the answers.
      blocks: of its blocks, and of those that lost what it would need, what happened to each.
      alignment: tokens of which every hit is a multiple.
      hit: the longest hit by its definition, in tokens.
      found: the hit that the line's `lookup` found; None for other operations.
      causes: causes for which the two may differ, by name.
      groups: from where each group could resume.
      lagging: of a hit offered to a connector, groups that lack its end, which a load has to bring.
    """

    line: int
    operation: str
    answer: str
    departed: int | None
    request: str = ""
    situation: str = ""
    events: tuple[Event, ...] = ()
    blocks: Mapping[int | str, tuple[Event, ...]] = dataclasses.field(default_factory=dict)
    alignment: int = 0
    hit: int = 0
    found: int | None = None
    causes: tuple[str, ...] = ()
    groups: tuple[Resumption, ...] = ()
    differs: str = ""
    lagging: tuple[int, ...] = ()


def find_request(log: Log, line: int, request: str | None, arrives: type, needed: bool = True) -> tuple[Any, str, int]:
    """The operation of a line, the request to describe, and the number of operations before the description.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names, or the last one named before it and not dropped.
      arrives: the type of the operation by which a request arrives, which is one that comes before.
      needed: whether there has to be a request; else its name is "" where no line names one that was not dropped.

    Raises:
      FileError: there is no such line.
      ConfigError: no line up to this one names a request, and none was given.
    """
    if not 2 <= line <= len(log.operations) + 1:
        raise FileError(log.path, None, "line", line, f"a line with an operation, from 2 to {len(log.operations) + 1}")
    operation = log.operations[line - 2]
    id = request if request is not None else _named_last(log.operations[: line - 1])
    if id is None and not needed:
        return operation, "", line - 2
    if id is None:
        raise ConfigError("request", None, f"a request, since no line up to {line} ({describe(operation)}) names one")
    came = isinstance(operation, arrives) and getattr(operation, "id", None) == id
    return operation, id, line - 1 if came else line - 2


def _named_last(operations: Sequence[Any]) -> str | None:
    """The request that the last operation names; or that the one before does, if the last names none, and so on."""
    dropped = set[str]()
    for operation in reversed(operations):
        id = getattr(operation, "id", None)
        if id is not None and id not in dropped:
            if operation is operations[-1] or type(operation).__struct_config__.tag != "drop":
                return id
            dropped.add(id)
    return None


def check_there(id: str, line: int, requests: Mapping[str, object]) -> None:
    """Make sure that a request has arrived.

    Raises:
      ConfigError: it has not, or was dropped.
    """
    if id not in requests:
        raise ConfigError("request", id, f"a request that has arrived by line {line} and was not dropped")

"""Account of a request and its blocks up to a line of a log, and of why its hit is not longer: its form.

Dialects give the account (`Dialect.explain`); this is what it consists of.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.explanation import Event, Explanation, find_request
from hkv.contract.log import Log, describe
from hkv.errors import ConfigError, UnsupportedConfigError


def account(log: Log, line: int, request: str | None = None, reference: str = "numpy") -> Explanation:
    """Account from `Dialect.resumptions` and the answers of a built-in engine; of blocks, nothing is told.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.
      reference: name of the engine.

    Raises:
      FileError: there is no such line.
      ConfigError: the line names no request and none was given, or the request has not arrived by then.
      UnsupportedConfigError: the dialect has no such engine, or no resumptions.
    """
    dialect = registry.dialect_of(log.header.dialect)
    operation, id, before = find_request(log, line, request, type(None))
    make = dialect.engine(reference)
    if make is None:
        raise UnsupportedConfigError("dialect", log.header.dialect, f"a dialect with an engine {reference}")
    engine, departed, events = make(log.header), None, list[Event]()
    for number, each in enumerate(log.operations[:before], 2):
        answer = dialect.perform(engine, each)
        if departed is None and dialect.compare(getattr(each, "want", None), answer, log.header.oplog) is not None:
            departed = number
        if getattr(each, "id", None) == id:
            events.append((number, f"{describe(each)}{_said(answer)}"))
    try:
        groups = tuple(dialect.resumptions(engine, operation, id))
    except LookupError:
        raise ConfigError("request", id, f"a request that is there before line {line}, or comes with it") from None
    answer = dialect.perform(engine, operation)
    if departed is None and dialect.compare(getattr(operation, "want", None), answer, log.header.oplog) is not None:
        departed = line
    return Explanation(
        line=line,
        operation=describe(operation),
        answer=_said(answer),
        departed=departed,
        request=id,
        situation=f"named by {len(events)} operations",
        events=tuple(events),
        blocks={},
        alignment=math.lcm(*(group.block_size for group in groups)),
        hit=min(group.largest for group in groups),
        found=None,
        causes=(),
        groups=groups,
    )


def _said(answer: Any) -> str:
    return "" if answer is None else f" answers {msgspec.json.encode(answer).decode()}"

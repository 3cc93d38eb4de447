"""What happened to a request and its blocks up to a line of a log, and why its hit is not longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from hkv.dialects.rtp_llm.log.file import RtpLog
from hkv.dialects.vllm.explain.resumption import Resumption, resumptions
from hkv.dialects.vllm.explain.story import Event, Story
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Hit
from hkv.dialects.vllm.traffic.hit_causes import causes
from hkv.errors import ConfigError, FileError
from hkv.oracle.check import describe
from hkv.oracle.log_file import Log

AnyLog: TypeAlias = Log | RtpLog


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What there is to say about one line.

    Attributes:
      line: the line.
      operation: what stands there.
      answer: what the reference answers to it, in words.
      departed: the first line, up to this one, at which the log's answer is not the reference's, or None.
      request: the request.
      situation: how it stands before the line, in words.
      events: what was asked for it, and answered.
      blocks: of its blocks, and of those that lost what it would need, what happened to each.
      alignment: tokens of which every hit is a multiple.
      hit: the longest hit by its definition, in tokens.
      found: the hit that the line's `lookup` found; None for other operations.
      causes: why the two may differ, by name.
      groups: from where each group could resume.
    """

    line: int
    operation: str
    answer: str
    departed: int | None
    request: str
    situation: str
    events: tuple[Event, ...]
    blocks: Mapping[int | str, tuple[Event, ...]]
    alignment: int
    hit: int
    found: int | None
    causes: tuple[str, ...]
    groups: tuple[Resumption, ...]


def explain(log: Log, line: int, request: str | None = None) -> Explanation:
    """Performs a log on the reference up to a line and tells about one request.

    Hits are judged by their definition (`reference.hits`), never by how an engine looks for them.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.

    Raises:
      FileError: there is no such line.
      ConfigError: the line names no request and none was given, or the request has not arrived by then.
    """
    operation, id, stop = find_request(log, line, request, oplog.RequestOp)
    story = Story(log)
    for index in range(stop):
        story.perform(index)
    check_there(id, line, story.engine.manager.requests)
    situation = story.situation(id)
    held = story.blocks_of(id)
    resumed = resumptions(story, id)
    answer = story.answers[-1] if stop == line - 1 else story.perform(line - 2)
    held |= story.blocks_of(id)
    held |= {lack.block for group in resumed.groups for lack in group.lacks if lack.block is not None}
    manager = story.engine.manager
    num_tokens = manager.requests[id].num_tokens if id in manager.requests else 0
    return Explanation(
        line=line,
        operation=describe(operation),
        answer=story.words(answer),
        departed=story.departed,
        request=id,
        situation=situation,
        events=tuple(story.requests[id]),
        blocks={block: tuple(story.blocks[block]) for block in sorted(held)},
        alignment=resumed.alignment,
        hit=resumed.hit,
        found=answer.hit if isinstance(answer, Hit) else None,
        causes=tuple(sorted(cause.value for cause in causes(story.config, num_tokens))),
        groups=resumed.groups,
    )


def find_request(log: AnyLog, line: int, request: str | None, arrives: type) -> tuple[Any, str, int]:
    """The operation of a line, the request to tell about, and how many operations come before what is told.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.
      arrives: the type of the operation by which a request arrives, which is one that comes before.

    Raises:
      FileError: there is no such line.
      ConfigError: the line names no request and none was given.
    """
    if not 2 <= line <= len(log.operations) + 1:
        raise FileError(log.path, None, "line", line, f"a line with an operation, from 2 to {len(log.operations) + 1}")
    operation = log.operations[line - 2]
    id = request if request is not None else getattr(operation, "id", None)
    if id is None:
        raise ConfigError("request", None, f"a request, since line {line} ({describe(operation)}) names none")
    came = isinstance(operation, arrives) and getattr(operation, "id", None) == id
    return operation, id, line - 1 if came else line - 2


def check_there(id: str, line: int, requests: Mapping[str, object]) -> None:
    """Make sure that a request has arrived.

    Raises:
      ConfigError: it has not, or was dropped.
    """
    if id not in requests:
        raise ConfigError("request", id, f"a request that has arrived by line {line} and was not dropped")

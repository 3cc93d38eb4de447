"""History of a request and its blocks up to a line of a log, and the reason why its hit is not longer."""

from __future__ import annotations

from hkv.dialects.vllm.explain.resumption import resumptions
from hkv.dialects.vllm.explain.story import Story
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Hit
from hkv.dialects.vllm.traffic.hit_causes import causes
from hkv.oracle.check import describe
from hkv.oracle.explain import Explanation, check_there, find_request
from hkv.oracle.log_file import Log


def explain(log: Log, line: int, request: str | None = None) -> Explanation:
    """Performs a log on the reference up to a line and tells about one request.

    Hits are judged by their definition (`reference.hits`), never by how an engine looks for them. Of a line up to which
    no request is there, such as an `events` before the first one, the answers are told alone.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.

    Raises:
      FileError: there is no such line.
      ConfigError: the request has not arrived by then.
    """
    operation, id, stop = find_request(log, line, request, oplog.RequestOp, needed=False)
    story = Story(log)
    if not id and request is None:
        for index in range(line - 1):
            story.perform(index)
        return _of_a_line(story, line, describe(operation))
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
        differs=story.differs,
    )


def _of_a_line(story: Story, line: int, operation: str) -> Explanation:
    """The account of the last line that was performed, without a request."""
    return Explanation(
        line=line,
        operation=operation,
        answer=story.words(story.answers[-1]),
        departed=story.departed,
        request="",
        situation="",
        events=(),
        blocks={},
        alignment=0,
        hit=0,
        found=None,
        causes=(),
        groups=(),
        differs=story.differs,
    )

"""History of a request and its blocks under RTP-LLM's rules, and what each group lacked for a longer hit."""

from __future__ import annotations

from hkv.dialects.rtp_llm.explain.story import RtpStory, rtp_words
from hkv.dialects.rtp_llm.log import structs
from hkv.model.group_policy import GroupType
from hkv.oracle.check import describe
from hkv.oracle.explain import Explanation, Lack, Resumption, check_there, find_request
from hkv.oracle.log_file import Log


def explain_rtp(log: Log, line: int, request: str | None = None) -> Explanation:
    """Performs a log on the reference up to a line and tells about one request.

    Hits are judged by their definition: a full group wants a block under every key, another one that votes under the
    last key only.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.

    Raises:
      FileError: there is no such line.
      ConfigError: the line names no request and none was given, or the request has not arrived by then.
    """
    story = RtpStory(log)
    operation, id, stop = find_request(log, line, request, structs.RequestOp)
    answer = None
    for index in range(stop):
        answer = story.perform(index)
    check_there(id, line, story.engine.manager.requests)
    situation, held = story.situation(id), story.blocks_of(id)
    keys = story.keys(id)
    size = _tokens_per_key(story)
    groups, hit = _resumptions(story, id, keys, size)
    lost = (
        {story.lost[group, key][1] for group in range(len(groups)) for key in keys if (group, key) in story.lost}
        if keys
        else set()
    )
    room = (
        _room(story, operation) if isinstance(operation, structs.MallocOp) and situation.startswith("waiting") else ""
    )
    if stop == line - 2:
        answer = story.perform(line - 2)
    held |= story.blocks_of(id)
    shown = held | {place for place in lost if any(lack.block == place[1] for each in groups for lack in each.lacks)}
    looked = isinstance(operation, structs.MallocOp) and operation.device_cache and situation.startswith("waiting")
    granted = isinstance(answer, structs.Malloc) and answer.verdict == "granted"
    return Explanation(
        line=line,
        operation=describe(operation),
        answer=rtp_words(operation, answer) + (room if _refused(answer) else ""),
        departed=story.departed,
        request=id,
        situation=situation,
        events=tuple(story.requests[id]),
        blocks={story.label(place): tuple(story.blocks[place]) for place in sorted(shown)},
        alignment=size,
        hit=hit,
        found=answer.reused if looked and granted and isinstance(answer, structs.Malloc) else None,
        causes=(),
        groups=tuple(groups),
    )


def _refused(answer: object) -> bool:
    return isinstance(answer, structs.Malloc) and answer.verdict != "granted"


def _room(story: RtpStory, operation: structs.MallocOp) -> str:
    """Blocks that a new request needs of each pool before a hit, and those available, in words."""
    from reference.dialects.rtp_llm.hybrid_pool import HybridPoolAllocator
    from reference.dialects.rtp_llm.operation import MallocInfo

    manager = story.engine.manager
    request, allocator = manager.requests[operation.id], manager.allocator
    info = MallocInfo(request.resource, request.lengths, operation.reuse, operation.device_cache)
    needs = [allocator.first_need(info)]
    if isinstance(allocator, HybridPoolAllocator):
        counted = [allocator.group_need(info, kind, 0) for kind in allocator.kinds]
        needs = [need.common + request.resource.batch * need.extra for need in counted]
    told = [
        f"{need} blocks, {pool.available} of {pool.total} available" + (f" in pool {i}" if len(needs) > 1 else "")
        for i, (need, pool) in enumerate(zip(needs, allocator.pools, strict=True))
    ]
    return f"; it needs before a hit {'; '.join(told)}; reserve {story.config.reserve_blocks}"


def _tokens_per_key(story: RtpStory) -> int:
    from reference.dialects.rtp_llm.joint_reuse import reused_tokens

    return reused_tokens(story.engine.manager.allocator, 1)


def _resumptions(story: RtpStory, id: str, keys: list[int], size: int) -> tuple[list[Resumption], int]:
    """Each group alone, and the longest hit of all, in tokens; a hit ends at a key."""
    groups = range(len(story.config.policies))
    lengths = range(len(keys) + 1)
    missing = {(group, n): _missing(story, group, keys[:n]) for group in groups for n in lengths}
    hit = max(n for n in lengths if not any(missing[group, n] for group in groups))
    beyond = hit + 1 if hit < len(keys) else None
    found = []
    for group in groups:
        policy = story.config.policies[group]
        alone = max(n for n in lengths if not missing[group, n])
        lacks = (
            ()
            if beyond is None
            else tuple(
                Lack(
                    index * size if policy.group_type is GroupType.FULL else 0,
                    (index + 1) * size - 1,
                    *_why(story, id, group, keys[index]),
                )
                for index in missing[group, beyond]
            )
        )
        kind = policy.group_type.name if _votes(story, group) else f"{policy.group_type.name}, no vote"
        block_size = story.config.topology.groups[group].spec.block_size
        found.append(
            Resumption(group, kind, block_size, alone * size, None if beyond is None else beyond * size, lacks)
        )
    return found, hit * size


def _votes(story: RtpStory, group: int) -> bool:
    policy = story.config.policies[group]
    return policy.group_type is not GroupType.SWA or policy.enable_prefix_reuse


def _missing(story: RtpStory, group: int, keys: list[int]) -> list[int]:
    """Indices of the keys that the group would have to have and has not."""
    wanted = range(len(keys))
    if story.config.policies[group].group_type is not GroupType.FULL:
        wanted = range(max(len(keys) - 1, 0), len(keys)) if _votes(story, group) else range(0)
    return [index for index in wanted if not _has(story, group, keys[index])]


def _has(story: RtpStory, group: int, key: int) -> bool:
    item = story.engine.manager.allocator.cache.peek(key)
    return item is not None and item.has(group) and item.matchable[group]


def _why(story: RtpStory, id: str, group: int, key: int) -> tuple[str, int | None]:
    if lost := story.lost.get((group, key)):
        line, place, by = lost
        return f"lost on line {line}, from block {story.label(place)} ({by})", place[1]
    if (group, key) in story.without:
        return f"entered on line {story.without[group, key]} without a block of this group", None
    if others := story.computing(key, id):
        return f"computed by {', '.join(others)}, which was not entered yet", None
    return "never entered", None

"""Coverage of RTP-LLM's rules by a log, as far as its operations and the recorded answers show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hkv.contract.log import Log
from hkv.dialects.rtp_llm.log import structs

RTP_RULES = {
    "hit/none": "a new request finds nothing",
    "hit/joint": "a new request takes blocks over",
    "hit/holes": "what it takes over has holes: of some group only the last block",
    "grant/grown": "a request that grew gets blocks",
    "grant/reserve": "tokens to come get slots",
    "prune/cleanup": "a request that grew gives blocks back",
    "refuse/permanent": "a request never fits",
    "refuse/retryable": "a request fits when others give blocks back",
    "refuse/internal": "what the cache holds could not be evicted",
    "fork/copied": "a sequence is forked, its last block copied",
    "fork/refused": "a fork finds no blocks",
    "insert/entered": "blocks are entered",
    "insert/resident": "blocks are entered for good",
    "evict/asked": "blocks are evicted as asked for",
    "evict/for-room": "cached blocks leave for a request's sake",
    "export/kept": "evicted blocks stay referenced",
    "hold/connector": "a connector holds blocks",
    "hold/request": "a request's blocks are held twice",
    "peak/estimated": "a peak is estimated",
}
"""The rules."""


def exercised_rtp(log: Log) -> dict[str, int]:
    """Rule to how often, of `RTP_RULES`; those that were not are left out."""
    counts: Counter[str] = Counter()
    lists: dict[str, structs.Lists] = {}
    cached, room = 0, False
    for operation in log.operations:
        match operation, getattr(operation, "want", None):
            case structs.MallocOp(), structs.Malloc() as answer:
                counts.update(_of_malloc(lists.get(operation.id, []), answer))
                lists[operation.id] = answer.lists
                room = room or answer.verdict == "granted"
            case structs.ForkOp(), structs.Fork() as answer:
                counts["fork/refused"] += answer.copies is None
                counts["fork/copied"] += bool(answer.copies)
                lists[operation.id] = answer.lists
            case structs.InsertOp(), _:
                counts["insert/resident" if operation.resident else "insert/entered"] += 1
                room = False
            case structs.FreeOp(), _:
                lists.pop(operation.id, None)
            case structs.EvictOp(), structs.Count() as answer:
                counts["evict/asked"] += answer.count > 0
                room = False
            case structs.ExportOp(), structs.Selected() as answer:
                counts["export/kept"] += answer.keys is not None
                room = False
            case structs.HoldOp(), structs.Selected() as answer:
                counts["hold/connector" if operation.connector else "hold/request"] += answer.keys is not None
            case structs.PeakOp(), _:
                counts["peak/estimated"] += 1
            case structs.RequestOp(), _:
                counts["grant/reserve"] += operation.reserve > 0
            case structs.StateOp(), structs.RtpState() as answer:
                counts["evict/for-room"] += room and len(answer.cached) < cached
                cached, room = len(answer.cached), False
    return {rule: counts[rule] for rule in RTP_RULES if counts[rule]}


def _of_malloc(before: structs.Lists, answer: structs.Malloc) -> list[str]:
    refusals = {"permanent": "refuse/permanent", "retryable": "refuse/retryable", "internal_error": "refuse/internal"}
    if answer.verdict in refusals:
        return [refusals[answer.verdict]]
    if not _real(before):
        if not answer.reused:
            return ["hit/none"]
        holes = any(blocks and blocks[0] == -1 for row in answer.lists for blocks in row)
        return ["hit/joint", "hit/holes"] if holes else ["hit/joint"]
    old, new = _real(before), _real(answer.lists)
    return ["grant/grown"] * (len(new - old) > 0) + ["prune/cleanup"] * (len(old - new) > 0)


def _real(lists: Sequence[Sequence[Sequence[int]]]) -> set[tuple[int, int]]:
    return {(group, block) for row in lists for group, blocks in enumerate(row) for block in blocks if block > 0}

"""Questions of a connector: the hit of each group by itself, and a hit cut at whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hkv.dialects.vllm.config import check_truncation
from reference.dialects.vllm.coordinator import Coordinator
from reference.dialects.vllm.hits import Found, search_limit
from reference.dialects.vllm.manager import Manager
from reference.dialects.vllm.request import Request


class ConnectorFound(NamedTuple):
    """Result of a connector's lookup.

    Attributes:
      found: hit, rows and shared prefix; where the hit diverged, those of each group by itself.
      diverged: whether some group lacks the hit's end, so that only a load can make it one to resume from.
      hits: tokens that each group finds by itself.
    """

    found: Found
    diverged: bool
    hits: list[int]


def connector_lookup(manager: Manager, id: str, limit: int | None = None) -> ConnectorFound:
    """The hit of a waiting request whose groups a connector may complete (`get_computed_blocks_for_connector`).

    Beside recurrent states the hit of full attention counts, whatever other groups have, unless one of them finds more:
    then, and for other caches, it is that of `Manager.lookup`.

    Args:
      manager: the cache.
      id: the request.
      limit: tokens that hits may have; None for all but the last.

    Raises:
      OperationError: misuse.
      EngineFailure: a defect asked for by name made the engine fail.
    """
    rows, hits = manager.searched(id, lambda cache, request: alone(cache, request, limit))
    members = manager.cache.members
    recurrent = any(kind.spec.snapshot for kind in manager.cache.kinds)
    if not members or manager.cache.alone or not recurrent or not members[0].first.spec.reads_all:
        whole = None
    else:
        whole = hits[members[0].first.group]
    if whole is None or max(hits) > whole:
        found = manager.lookup(id, limit)
        manager.forget_hit()
        return ConnectorFound(found, False, hits)
    manager.forget_hit()
    return ConnectorFound(Found(whole, rows, 0), min(hits) < whole, hits)


def alone(cache: Coordinator, request: Request, limit: int | None) -> tuple[list[list[int]], list[int]]:
    """Rows and tokens that each group finds by itself; groups of equal spec together."""
    most = request.num_tokens - 1 if limit is None else limit
    rows, hits = [[] for _ in cache.kinds], [0] * len(cache.kinds)
    for member in cache.members:
        kind = member.first
        length = most
        if member.eagle and not cache.alone:
            length = search_limit(kind, most, request.keys, cache.config.partial_hits)
        alignment = kind.block_size if cache.alone else kind.alignment
        found, hit = kind.find(request.keys, length, member.groups, member.eagle, alignment)
        for group, row in zip(member.groups, found, strict=True):
            rows[group], hits[group] = list(row), hit
    return rows, hits


def truncate(manager: Manager, rows: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Rows of a hit up to its first `tokens` tokens, whole blocks; states may end before (`truncate_computed_blocks`).

    Raises:
      OperationError: `tokens` is inside a block, or beyond what a group has.
    """
    check_truncation(manager.config, rows, tokens)
    return [list(row[: tokens // kind.block_size]) for kind, row in zip(manager.cache.kinds, rows, strict=True)]

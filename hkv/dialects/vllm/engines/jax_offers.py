"""States that a connector is offered, told from what operations of the compiled cache registered and copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.log.structs import CacheState, ConnectorHit, Hit, Offer, Offers
from hkv.dialects.vllm.rules.parameters import finder_groups
from hkv.state.events import Event
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Row


class _State(NamedTuple):
    """A state of a request, and what its block was known by when it was registered."""

    id: str
    block: int
    entry: tuple[int, int, str]


class PendingOffers:
    """Offers that were not taken yet.

    Args:
      offered: of each group, whether its states are offered.
      block_sizes: tokens in a block of each group.
      stale: whether a state is offered that its block does not hold any more (`hkv.bugs`: offer-outlives-state).
    """

    def __init__(self, offered: Sequence[bool], block_sizes: Sequence[int], stale: bool) -> None:
        self._offered, self._sizes, self._stale = tuple(offered), tuple(block_sizes), stale
        self._offers: list[list[_State]] = [[] for _ in offered]
        self._tails: dict[tuple[str, int], _State] = {}

    def note(
        self, id: str, events: np.ndarray, copies: Iterable[Sequence[int]], request: np.ndarray, state: CacheState
    ) -> None:
        """Takes note of what one operation about a request did.

        Args:
          id: the request.
          events: changes to keys, int32[n, 4] (`hkv.state.events`).
          copies: group, source and target of copies that it left to the cache.
          request: the request's words in the compiled cache's state, int32[REQUEST_WORDS + GROUP_WORDS * groups].
          state: the cache after it.
        """
        for group, _, target in copies:
            tail = self._tails.pop((id, group), None)
            if tail is not None:
                self._offers[group].append(tail._replace(block=target))
        for word, group, start, end in events.tolist():
            if word % 8 == Event.STORED and self._offered[group]:
                blocks = [str(block) for block in state.rows[id][group][start:end]]
                known = [_State(id, int(block), state.cached[block]) for block in blocks if block in state.cached]
                self._offers[group] += known
            elif word % 8 == Event.STORED_PART and self._offered[group]:
                self._note_tail(id, group, end, request, state)

    def _note_tail(self, id: str, group: int, end: int, request: np.ndarray, state: CacheState) -> None:
        """A key that ends inside a block is the prompt's tail where the row notes that block as one to be copied."""
        column = int(request[REQUEST_WORDS + GROUP_WORDS * group + Row.PARTIAL]) - 1
        if column >= 0 and end % self._sizes[group]:
            block = state.rows[id][group][column]
            self._tails[id, group] = _State(id, block, state.cached[str(block)])

    def take(self, state: CacheState) -> Offers:
        """The offers, group by group; `state` is the cache now."""
        answer: Offers = {}
        for group, offers in enumerate(self._offers):
            for offer in offers:
                if self._is_good(offer, state):
                    answer.setdefault(offer.id, []).append((group, offer.block, offer.entry[1]))
            offers.clear()
        return answer

    def finalize(self, id: str, tokens: int, state: CacheState) -> list[Offer]:
        """The request's tails that are `tokens` long, as the cache is now; there are none of them after this."""
        tails = [(group, self._tails.pop((id, group), None)) for group in range(len(self._offered))]
        return [
            (group, tail.block, tokens)
            for group, tail in tails
            if tail is not None and tail.entry[1] == tokens and self._is_good(tail, state)
        ]

    def withdraw(self, id: str) -> None:
        """The request ends: nothing of it is offered any more."""
        for offers in self._offers:
            offers[:] = [offer for offer in offers if offer.id != id]
        for group in range(len(self._offered)):
            self._tails.pop((id, group), None)

    def _is_good(self, offer: _State, state: CacheState) -> bool:
        block = str(offer.block)
        return self._stale or (block in state.refs and state.cached.get(block) == offer.entry)


def connector_hit(config: VllmConfig, by_itself: Callable[[int], Hit], lookup: Callable[[], Hit]) -> ConnectorHit:
    """The hit of a request whose groups a connector may complete.

    Args:
      config: the configuration.
      by_itself: looks the request up in the groups of one place of `finder_groups` alone.
      lookup: looks it up in all groups together.
    """
    rows, hits = [[] for _ in config.topology.specs], [0] * len(config.topology.specs)
    for place, members in enumerate(finder_groups(config)):
        found = by_itself(place)
        for group in members:
            rows[group], hits[group] = found.blocks[group], found.hit
    full = config.completed_group
    if full is None or max(hits) > hits[full]:
        found = lookup()
        return ConnectorHit(found.hit, found.blocks, found.shared_prefix, False, hits)
    return ConnectorHit(hits[full], rows, 0, min(hits) < hits[full], hits)

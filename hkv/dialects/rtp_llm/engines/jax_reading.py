"""Reading of the arrays of a cache under RTP-LLM's rules, in the words of its logs. Host-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NULL, SINGLE, RtpConfig
from hkv.keys.rolling import RollingKeys
from hkv.state.pooled import (
    ITEM_WORDS,
    MARK_WORDS,
    REQUEST_WORDS,
    Counter,
    Item,
    PooledRequest,
    PooledState,
    Role,
    members_of,
)


class RtpReader:
    """Reads states of one configuration."""

    def __init__(self, config: RtpConfig) -> None:
        self._config = config
        self._groups = len(config.policies)

    def state(self, state: PooledState, slots: Mapping[str, int], keys: Sequence[Any]) -> structs.RtpState:
        """State of the cache, as far as engines are compared: `slots` of requests by name, `keys` by number."""
        lists = {id: self.lists(state, slot) for id, slot in slots.items()}
        items = np.asarray(state.items)
        cached = [
            (keys[number], _holes(items[number, ITEM_WORDS : ITEM_WORDS + self._groups])) for number in _in_order(items)
        ]
        return structs.RtpState(
            pools=[self._pool(state, pool) for pool in range(len(self._config.num_blocks))],
            lists={id: rows for id, rows in lists.items() if any(blocks for row in rows for blocks in row)},
            cached=cached,
            version=int(np.asarray(state.counters)[Counter.VERSION]),
        )

    def lists(self, state: PooledState, slot: int) -> structs.Lists:
        """Blocks of each sequence of a request and each group, holes included."""
        record, rows = np.asarray(state.requests)[slot], np.asarray(state.rows)[slot]
        lengths = _lengths(state, record)
        return [
            [_holes(rows[sequence, group, : lengths[sequence, group]]) for group in range(self._groups)]
            for sequence in range(record[PooledRequest.BATCH])
        ]

    def running(self, state: PooledState, slot: int) -> bool:
        """True if a request's first sequence has slots."""
        return bool(_lengths(state, np.asarray(state.requests)[slot])[0, : self._groups].any())

    def reserve(self, state: PooledState, slot: int) -> int:
        """Tokens that get slots beyond a request's own."""
        return int(np.asarray(state.requests)[slot, PooledRequest.RESERVE])

    def selected(self, lists: list[list[int]], keys: RollingKeys, *, dummy_tail: bool) -> structs.Selected:
        """The keys of a sequence that have a block, and each group's block there (RTP-LLM `incrKVCacheRef`).

        With `dummy_tail` the key of a partly filled block is kept, as a mark, even if it has none.
        """
        chosen: list[int] = []
        for position in range(len(keys.keys)):
            real = any(position < len(blocks) and blocks[position] > 0 for blocks in lists)
            last = bool(chosen) and position == len(keys.keys) - 1
            tail = position >= len(lists[0]) if self._config.name == SINGLE else last
            if real or (dummy_tail and not keys.aligned and tail):
                chosen.append(position)
        columns = [[blocks[p] if p < len(blocks) else NULL for p in chosen] for blocks in lists]
        if not any(block > 0 for blocks in columns for block in blocks):
            return structs.Selected(None, None)
        return structs.Selected([keys.keys[position] for position in chosen], columns)

    def _pool(self, state: PooledState, pool: int) -> structs.PoolState:
        references = np.asarray(state.references)[pool]
        counts = {
            role.name.lower(): {
                str(block): int(references[block, role]) for block in np.flatnonzero(references[:, role])
            }
            for role in Role
        }
        return structs.PoolState(free=members_of(np.asarray(state.bitmap)[pool], state.buckets.levels), **counts)


def _in_order(items: np.ndarray) -> list[int]:
    """Numbers of the cached keys, the least recently used first."""
    ring, found = len(items) - 2, []
    number = int(items[ring, Item.NEXT])
    while number != ring:
        found.append(number)
        number = int(items[number, Item.NEXT])
    return found


def _lengths(state: PooledState, record: np.ndarray) -> np.ndarray:
    """Slots of each sequence in each group."""
    sequences, groups = state.rows.shape[1:3]
    words = record[REQUEST_WORDS : REQUEST_WORDS + sequences * (groups + MARK_WORDS)]
    return words.reshape(sequences, groups + MARK_WORDS)[:, :groups]


def _holes(blocks: np.ndarray) -> list[int]:
    return np.where(blocks == 0, NULL, blocks).tolist()

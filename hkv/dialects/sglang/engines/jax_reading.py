"""Reading of the arrays of a cache under SGLang's rules, in the words of its logs. Host-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import SGLangConfig
from hkv.dialects.sglang.engines import of_components, places, walk
from hkv.dialects.sglang.engines.pages import Pages
from hkv.state.nodes import PRESENT, Node
from hkv.state.radix import (
    COUNT_WORDS,
    FULL,
    POOL_COUNT_WORDS,
    STATES,
    WINDOW,
    Key,
    PoolCount,
    RadixNode,
    RadixRequest,
    RadixState,
)


def pool_counts(state: RadixState) -> np.ndarray:
    """int32[8, 3]: `PoolCount` of each pool."""
    return np.array(state.counters)[COUNT_WORDS:-1].reshape(-1, POOL_COUNT_WORDS).T


@dataclasses.dataclass(eq=False)
class ReadNode:
    """A node as it is read from the arrays; `words` are its row."""

    words: np.ndarray
    parent: int
    tokens: list[int]
    namespace: tuple[str | None, str | None]
    slots: list[int]
    children: dict[int, ReadNode] = dataclasses.field(default_factory=dict)

    def word(self, field: RadixNode | Node) -> int:
        """A word of its row."""
        return int(self.words[field])


class SGLangReader:
    """Reads states of one configuration, whose keys are numbers of `pages`."""

    def __init__(self, config: SGLangConfig, pages: Pages) -> None:
        self._config, self._pages = config, pages

    def held(self, state: RadixState, slot: int) -> list[int]:
        """A request's own fields, by `RadixRequest`."""
        return np.asarray(state.requests)[slot].tolist()

    def row(self, state: RadixState, slot: int) -> list[int]:
        """Full slots of a request's tokens."""
        length = self.held(state, slot)[RadixRequest.LENGTH]
        pages = np.asarray(state.rows)[slot, : -(-length // self._config.page_size)]
        return self.slots(pages)[:length]

    def slots(self, pages: np.ndarray) -> list[int]:
        """Slots of pages."""
        size = self._config.page_size
        return (pages[:, None] * size + np.arange(size)).ravel().tolist()

    def state(self, state: RadixState, slots: Mapping[str, int]) -> structs.State:
        """Everything, as far as engines are compared; `slots` of requests by name."""
        config, rows, nodes = self._config, self._nodes(state), []
        root, *_ = rows.values()
        nodes = list(walk(root, lambda node: (node.namespace, node.tokens)))
        numbers = {id(node): number for number, node in enumerate(nodes)}
        rank = {row: numbers[id(node)] for row, node in rows.items() if row}
        used = places(node.word(Node.PLACE) for node in rows.values())
        made = places(node.word(RadixNode.MADE) for node in nodes)
        mapping = np.asarray(state.mapping)
        told = [
            structs.TreeNode(
                parent=rank.get(node.parent, -1),
                namespace=node.namespace,
                tokens=node.tokens,
                slots=node.slots,
                window=self._window(mapping, node.slots) if node.word(RadixNode.LIVE) else None,
                state=node.word(RadixNode.STATE) or None,
                locks=of_components(
                    config, *map(node.word, (RadixNode.LOCKS, RadixNode.WINDOW_LOCKS, RadixNode.STATE_LOCKS))
                ),
                mark=node.word(RadixNode.MARK) != 0,
                hits=node.word(RadixNode.HITS),
                priority=node.word(RadixNode.PRIORITY),
                used=used[node.word(Node.PLACE)],
                made=made[node.word(RadixNode.MADE)],
            )
            for node in nodes
        ]
        requests = {id: self._owned(state, slot) for id, slot in slots.items()}
        rings = of_components(config, RadixNode.OLDER, RadixNode.OLDER, RadixNode.STATE_OLDER)[1:]
        return structs.State(
            pools=[self._pool(state, pool) for pool in of_components(config, FULL, WINDOW, STATES)],
            window=self._mapped(mapping, requests) if config.window is not None else [],
            requests=requests,
            nodes=told,
            recent=[[rank[row] for row in _ring(np.asarray(state.nodes), field)] for field in rings],
            ledgers=self._ledgers(state),
        )

    def _ledgers(self, state: RadixState) -> list[structs.Ledger]:
        counts, size = pool_counts(state), self._config.page_size
        idle, there = counts[PoolCount.UNHELD], counts[PoolCount.CAME] - counts[PoolCount.LEFT]
        tokens = np.stack([idle, there - idle], axis=1) * [[size], [size], [1]]
        return [structs.Ledger(*tokens[pool].tolist()) for pool in of_components(self._config, FULL, WINDOW, STATES)]

    def _nodes(self, state: RadixState) -> dict[int, ReadNode]:
        """Nodes by their rows, the root first, each among its parent's children."""
        rows, keys = np.asarray(state.nodes)[:-1], np.asarray(state.keys)
        found = {0: ReadNode(rows[0], -1, [], (None, None), [])}
        for row in np.flatnonzero(rows[:, Node.FLAGS] & PRESENT).tolist():
            if row == 0:
                continue
            words = rows[row]
            numbers = [int(words[RadixNode.FIRST])]
            for _ in range(words[RadixNode.END] - words[RadixNode.START] - 1):
                numbers.append(int(keys[numbers[-1], Key.NEXT]))
            found[row] = ReadNode(
                words,
                int(words[Node.PARENT]) - 1,
                self._pages.tokens(numbers),
                self._pages.namespace(numbers[0]),
                self.slots(keys[numbers, Key.PAGE]),
            )
        for row, node in found.items():
            if row:
                found[node.parent].children[row] = node
        return found

    def _owned(self, state: RadixState, slot: int) -> structs.Owned:
        held, size = self.held(state, slot), self._config.page_size
        states = [
            held[field]
            for field in (RadixRequest.STATE, RadixRequest.FIRST_TRACK, RadixRequest.SECOND_TRACK)
            if held[field]
        ]
        return structs.Owned(
            self.row(state, slot),
            held[RadixRequest.PROTECTED] * size,
            held[RadixRequest.ENTERED] * size,
            held[RadixRequest.SLID] * size,
            states,
            held[RadixRequest.TRACKED] or None,
        )

    def _pool(self, state: RadixState, pool: int) -> structs.Pool:
        words = np.asarray(state.counters)[COUNT_WORDS + POOL_COUNT_WORDS * pool :]
        free, waiting = words[PoolCount.FREE], words[PoolCount.WAITING]
        ring = np.arange(free + waiting) + words[PoolCount.FRONT]
        pages = np.asarray(state.lists)[pool, ring % (np.asarray(state.lists).shape[1] - 1)].tolist()
        return structs.Pool(pages[:free], pages[free:])

    def _window(self, mapping: np.ndarray, slots: list[int]) -> list[int]:
        size = self._config.page_size
        return [int(mapping[slot // size]) * size + slot % size for slot in slots]

    def _mapped(self, mapping: np.ndarray, requests: dict[str, structs.Owned]) -> list[tuple[int, int]]:
        """Window slots of full ones. A page that a request has not filled has them only as far as its tokens go."""
        size, slots = self._config.page_size, set(self.slots(np.flatnonzero(mapping[:-1])))
        for owned in requests.values():
            last = owned.slots[-1] if owned.slots else -1
            slots -= set(range(last + 1, (last // size + 1) * size))
        return list(zip(sorted(slots), self._window(mapping, sorted(slots)), strict=True))


def _ring(nodes: np.ndarray, field: RadixNode) -> list[int]:
    """Rows of a ring of nodes, the one used last first."""
    found, row = [], int(nodes[0, field])
    while row:
        found.append(row)
        row = int(nodes[row, field])
    return found

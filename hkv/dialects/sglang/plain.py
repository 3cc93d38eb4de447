"""SGLang's text over plain objects: an empty cache of a configuration, and its state in the words of logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import POLICIES, SGLangConfig
from hkv.dialects.sglang.engines import of_components, places, walk
from hkv.dialects.sglang.engines.pages import Namespace, Pages
from hkv.version import check_reference

check_reference()  # before the first import of it

from reference.dialects.sglang import pools  # noqa: E402
from reference.dialects.sglang.records import Cache, Key, Node, Policy, Pool, Request  # noqa: E402
from reference.language import Layout, Ring  # noqa: E402

LAYOUT = Layout(Cache)
"""Names and places of the state of SGLang's cache."""


def settings(config: SGLangConfig, *, alone: bool = False) -> dict[str, int]:
    """The configuration of the text, by names of its scalars; `alone`: of a tree without pools."""
    defects = (name for name in LAYOUT.settings if name.startswith("defects."))
    found = {
        "config.page": config.page_size,
        "config.window": config.window or 0,
        "config.eagle": config.bigrams,
        "config.sorts": config.need_sort,
        "config.states": config.states is not None,
        "config.tracked": config.tracked,
        "config.most_states": config.most_states,
        "config.alone": alone,
        "leaves.policy": Policy(POLICIES.index(config.policy)),
        **{name: name.removeprefix("defects.").replace("_", "-") in config.bugs for name in defects},
    }
    return {name: int(value) for name, value in found.items()}


def empty(config: SGLangConfig, *, alone: bool = False, **sizes: int) -> Cache:
    """An empty cache; `alone`: without pages, which whoever drives the tree brings. Sizes as of `sizes_of`."""
    cache: Cache = LAYOUT.make(sizes_of(config, alone=alone, **sizes))
    for name, value in settings(config, alone=alone).items():
        part, _, field = name.partition(".")
        setattr(getattr(cache, part), field, value)
    for pool in (cache.full, cache.swa, cache.states):
        pool.mask = len(pool.free) - 1
    cache.slots, cache.row = sizes["requests"], sizes["row"]
    pools.empty(cache, *pages_of(config, alone=alone), len(cache.nodes) - 1)
    return cache


def pages_of(config: SGLangConfig, *, alone: bool = False) -> tuple[int, int, int]:
    """Pages of the full pool, of the window's, and states; 0 for what there is not."""
    full, window = [0, 0] if alone else [*config.num_slots, 0][:2]
    return full // config.page_size, window // config.page_size, 0 if alone else config.states or 0


def sizes_of(
    config: SGLangConfig,
    *,
    keys: int,
    requests: int,
    row: int,
    operations: int = 1,
    payload: int = 0,
    room: int = 0,
    alone: bool = False,
) -> dict[str, int]:
    """Sizes of a cache (`Layout.make`).

    Args:
      config: the configuration.
      keys: names of pages that there is room for.
      requests: requests at the same time.
      row: pages of a request.
      operations: operations that there is room for.
      payload: keys of theirs; as many as a row has at least.
      room: pages that there is room for at least, or four times as many as often as it takes, so that caches of several
      sizes are alike.
      alone: without pages.
    """
    pages = pages_of(config, alone=alone)
    while 0 < room < max(pages):
        room *= 4
    return {
        **{"keys": keys, "nodes": max(room, pages[0]) + 2, "requests": requests + 1},
        **{"operations": operations, "results": operations, "payload": max(row, payload)},
        **{"peer": max(room, pages[0]) + 1, "leaves.items": max(room, pages[0]) + 3},
        **{"requests.row": row, "requests.chain": row + 1},
        **{
            f"{pool}.free": 1 << max(room, count).bit_length()
            for pool, count in zip(("full", "swa", "states"), pages, strict=True)
        },
    }


def nodes_left(cache: Cache) -> int:
    """Records that are no node's."""
    count, node = 0, cache.vacant
    while node is not None:
        count, node = count + 1, node.parent
    return count


def pools_of(config: SGLangConfig, cache: Cache) -> list[tuple[Pool, int]]:
    """The pools that a cache has, and the tokens of a page of each, or the one state."""
    size = config.page_size
    return of_components(config, (cache.full, size), (cache.swa, size), (cache.states, 1))


@dataclasses.dataclass(eq=False)
class Seen:
    """A node as its state is told: its keys, their namespace and tokens, and the nodes after it."""

    row: Node
    keys: list[Key]
    namespace: Namespace
    tokens: list[int]
    children: dict[int, Seen] = dataclasses.field(default_factory=dict[int, "Seen"])


class Reader:
    """Reads a cache in the words of its logs.

    Args:
      config: its configuration.
      pages: what its keys are numbers of, from 0 on.
    """

    def __init__(self, config: SGLangConfig, pages: Pages) -> None:
        self._config, self._pages = config, pages

    def slots(self, pages: Sequence[int]) -> list[int]:
        """Slots of pages."""
        size = self._config.page_size
        return [page * size + place for page in pages for place in range(size)]

    def row(self, request: Request) -> list[int]:
        """Full slots of a request."""
        return self.slots(request.row[: -(-request.length // self._config.page_size)])[: request.length]

    def walk(self, cache: Cache) -> Iterator[Seen]:
        """Nodes in the order in which a state lists them: each before those after it, siblings by their tokens."""
        seen: dict[Node, Seen] = {cache.root: Seen(cache.root, [], (None, None), [])}
        numbers = {key: number for number, key in enumerate(cache.keys[1:])}
        for head in cache.keys[1:]:
            if head.head is None:
                continue
            keys, key = [head], head
            for _ in range(head.head.end - head.head.start - 1):
                key = key.next
                keys.append(key)
            named = [numbers[key] for key in keys]
            seen[head.head] = Seen(head.head, keys, self._pages.namespace(named[0]), self._pages.tokens(named))
        for number, node in enumerate(seen.values()):
            if node.row is not cache.root:
                seen[node.row.parent].children[number] = node
        return walk(seen[cache.root], lambda node: (node.namespace, node.tokens))

    def nodes(self, cache: Cache) -> tuple[list[structs.TreeNode], list[list[int]]]:
        """Nodes, and the orders of their window slots and states."""
        config, nodes = self._config, list(self.walk(cache))
        numbers = {node.row: number for number, node in enumerate(nodes)}
        used = places([cache.root.used, *(node.row.used for node in nodes)])
        made = places(node.row.made for node in nodes)
        told = [
            structs.TreeNode(
                parent=numbers.get(node.row.parent, -1),
                namespace=node.namespace,
                tokens=node.tokens,
                slots=self.slots([key.page for key in node.keys]),
                window=self.slots([cache.peer[key.page] for key in node.keys]) if node.row.live else None,
                state=node.row.state or None,
                locks=of_components(config, node.row.full_locks, node.row.window_locks, node.row.state_locks),
                mark=node.row.mark != 0,
                hits=node.row.hits,
                priority=node.row.priority,
                used=used[node.row.used],
                made=made[node.row.made],
            )
            for node in nodes
        ]
        rings = of_components(config, [], [cache.recent], [cache.recent_states])[1:]
        return told, [[numbers[node] for node in _newest_first(ring)] for (ring,) in rings]

    def ledgers(self, cache: Cache) -> list[structs.Ledger]:
        """Tokens, and states, of the tree that nobody holds, and that somebody does."""
        return [structs.Ledger(pool.idle * size, pool.held * size) for pool, size in pools_of(self._config, cache)]

    def state(self, cache: Cache, requests: Mapping[str, Request]) -> structs.State:
        """Everything."""
        size = self._config.page_size
        owned = {
            id: structs.Owned(
                self.row(request),
                request.protected * size,
                request.entered * size,
                request.slid * size,
                [state for state in (request.own, request.kept_first, request.kept_second) if state],
                request.tracked or None,
            )
            for id, request in requests.items()
        }
        pools = [
            structs.Pool(_listed(pool, 0, pool.count), _listed(pool, pool.count, pool.waiting))
            for pool, _ in pools_of(self._config, cache)
        ]
        return structs.State(pools, self._mapped(cache, owned), owned, *self.nodes(cache), self.ledgers(cache))

    def _mapped(self, cache: Cache, owned: Mapping[str, structs.Owned]) -> list[tuple[int, int]]:
        """The window slot of each full slot that has one; a request's last page has them as far as it is filled."""
        if self._config.window is None:
            return []
        size, pages = self._config.page_size, [page for page, peer in enumerate(cache.peer) if peer and page]
        found = dict(zip(self.slots(pages), self.slots([cache.peer[page] for page in pages]), strict=True))
        for request in owned.values():
            last = request.slots[-1] if request.slots else -1
            for slot in range(last + 1, (last // size + 1) * size):
                found.pop(slot, None)
        return sorted(found.items())


def _listed(pool: Pool, start: int, count: int) -> list[int]:
    return [pool.free[(pool.front + start + n) & pool.mask] for n in range(count)]


def _newest_first(ring: Ring[Node]) -> Iterator[Node]:
    node = ring.older[ring.ends]
    while node is not ring.ends:
        yield node
        node = ring.older[node]

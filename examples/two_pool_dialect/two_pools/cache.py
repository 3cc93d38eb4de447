"""A radix cache whose pages have a block in each of two pools. A page may lose its window's block alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from hkv.contract.log import PooledHeader
from two_pools.log import AdmitOp, Allocation, AppendOp, FreeOp, State, StateOp

FULL, WINDOW = 0, 1
GONE = -1


@dataclasses.dataclass(eq=False)
class Node:
    """A cached page: its tokens follow those of its ancestors. `blocks` and `users` are by pool."""

    blocks: list[int]
    parent: Node | None = None
    page: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)
    users: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    used: int = 0


class Request(NamedTuple):
    """A running request: pages that it shares, and for those after them a block of its own in each pool."""

    tokens: list[int]
    path: list[Node]
    blocks: list[list[int]]


class RadixPools:
    """Least recently used leaves are evicted for blocks of full attention, pages' window blocks for the other pool."""

    def __init__(self, header: PooledHeader) -> None:
        self.size: int = header.groups[FULL]["block_size"]
        self.span = -(-(header.groups[WINDOW]["window"] - 1) // self.size)
        self.free_blocks = [list(range(count)) for count in header.num_blocks]
        self.root = Node([GONE, GONE])
        self.requests: dict[str, Request] = {}
        self.clock = self.evictions = 0

    def perform(self, operation: Any) -> Any:
        """Performs an operation and answers it."""
        self.clock += 1
        return getattr(self, operation.__struct_config__.tag)(operation)

    def admit(self, operation: AdmitOp) -> Allocation:
        """Adopts the longest prefix whose window is there, one token at least being left to compute."""
        path = self.longest(self.walk(operation.tokens[:-1]))
        self.pin(path, 1)
        blocks = self.take(-(-len(operation.tokens) // self.size) - len(path))
        if blocks is None:
            self.pin(path, -1)
            return Allocation(0, None)
        self.requests[operation.id] = Request(operation.tokens, path, blocks)
        return Allocation(len(path) * self.size, blocks)

    def append(self, operation: AppendOp) -> Allocation:
        """Takes blocks for more tokens."""
        request = self.requests[operation.id]
        tokens = request.tokens + operation.tokens
        blocks = self.take(-(-len(tokens) // self.size) - len(request.path) - len(request.blocks[FULL]))
        if blocks is not None:
            own = [mine + more for mine, more in zip(request.blocks, blocks, strict=True)]
            self.requests[operation.id] = Request(tokens, request.path, own)
        return Allocation(0, blocks)

    def free(self, operation: FreeOp) -> None:
        """Enters whole pages; a page that lost its window's block gets the request's, all other blocks are free."""
        request = self.requests.pop(operation.id)
        self.pin(request.path, -1)
        node, known, left = self.root, len(request.path), [set(own) for own in request.blocks]
        for index, page in enumerate(self.pages(request.tokens)[: None if operation.keep else known]):
            if page not in node.children:
                node.children[page] = Node([GONE, GONE], node, page)
            node = node.children[page]
            node.used = self.clock
            for pool in (FULL, WINDOW) if index >= known else ():
                if node.blocks[pool] == GONE:
                    node.blocks[pool] = request.blocks[pool][index - known]
                    left[pool].remove(node.blocks[pool])
        self.free_blocks = [sorted({*free, *own}) for free, own in zip(self.free_blocks, left, strict=True)]

    def state(self, operation: StateOp) -> State:
        """Everything there is."""
        cached = [[*node.blocks, node.parent.blocks[FULL], *node.users] for node in self.nodes() if node.parent]
        requests = self.requests.values()
        held = [sorted(block for each in requests for block in each.blocks[pool]) for pool in (FULL, WINDOW)]
        read = sorted(node.blocks[WINDOW] for each in requests for node in self.tail(each.path))
        return State([list(free) for free in self.free_blocks], sorted(cached), held, read)

    def take(self, count: int) -> list[list[int]] | None:
        """So many blocks of each pool, the smallest ids first; None, and nothing changes, where there are too few."""
        if any(count > len(self.free_blocks[pool]) + len(self.evictable(pool)) for pool in (FULL, WINDOW)):
            return None
        for pool in (FULL, WINDOW):
            while len(self.free_blocks[pool]) < count:
                self.evict(pool)
        taken = [free[:count] for free in self.free_blocks]
        self.free_blocks = [free[count:] for free in self.free_blocks]
        return taken

    def evictable(self, pool: int) -> list[Node]:
        """Pages whose block in a pool nobody uses."""
        return [node for node in self.nodes() if node.blocks[pool] != GONE and not node.users[pool]]

    def evict(self, pool: int) -> None:
        """A leaf goes whole for full attention; for the window a page loses that block alone."""
        nodes = [node for node in self.evictable(pool) if pool == WINDOW or not node.children]
        victim = min(nodes, key=lambda node: (node.used, node.blocks[pool]))
        for each in (FULL, WINDOW) if pool == FULL else (WINDOW,):
            if victim.blocks[each] != GONE:
                self.free_blocks[each] = sorted([*self.free_blocks[each], victim.blocks[each]])
                victim.blocks[each] = GONE
                self.evictions += 1
        if pool == FULL and victim.parent is not None:
            del victim.parent.children[victim.page]

    def pin(self, path: list[Node], users: int) -> None:
        """These have so many users more; of the window's blocks, those that the next token reads."""
        for pool, nodes in ((FULL, path), (WINDOW, self.tail(path))):
            for node in nodes:
                node.users[pool] += users

    def tail(self, path: list[Node]) -> list[Node]:
        """The pages at its end that the window of the next token covers."""
        return path[max(0, len(path) - self.span) :]

    def walk(self, tokens: list[int]) -> list[Node]:
        """Pages of the longest prefix that is in the tree."""
        path = [self.root]
        for page in self.pages(tokens):
            if page not in path[-1].children:
                break
            path.append(path[-1].children[page])
        return path[1:]

    def longest(self, path: list[Node]) -> list[Node]:
        """Its longest beginning after which the next token's whole window is there."""
        ends = range(len(path), -1, -1)
        gone = [node.blocks[WINDOW] == GONE for node in path]
        return path[: next(end for end in ends if not any(gone[max(0, end - self.span) : end]))]

    def pages(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The tokens of each whole page."""
        return list(zip(*[iter(tokens)] * self.size, strict=False))

    def nodes(self) -> Iterator[Node]:
        """The root, and every cached page."""
        waiting = [self.root]
        while waiting:
            yield (node := waiting.pop())
            waiting += node.children.values()


class CarelessPools(RadixPools):
    """A cache that forgets that running requests read their window's blocks."""

    def pin(self, path: list[Node], users: int) -> None:
        """The defect."""
        for node in path:
            node.users[FULL] += users

"""The radix cache itself, and one with a defect."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from hkv.contract.log import PlainHeader
from toy_dialect.log import AdmitOp, Allocation, AppendOp, FreeOp, State, StateOp


@dataclasses.dataclass(eq=False)
class Node:
    """A cached block: its tokens follow those of its ancestors."""

    block: int
    parent: Node | None = None
    page: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)
    users: int = 0
    used: int = 0


class Request(NamedTuple):
    """A running request: nodes that it reads, and blocks of its own that come after them."""

    tokens: list[int]
    path: list[Node]
    blocks: list[int]


class RadixCache:
    """One group over one pool. The free block of the smallest id is handed out first."""

    def __init__(self, header: PlainHeader) -> None:
        self.size: int = header.groups[0]["block_size"]
        self.free_blocks = list(range(header.num_blocks))
        self.root = Node(-1)
        self.requests: dict[str, Request] = {}
        self.clock = self.evictions = 0

    def perform(self, operation: Any) -> Any:
        """Performs an operation and answers it."""
        self.clock += 1
        return getattr(self, operation.__struct_config__.tag)(operation)

    def admit(self, operation: AdmitOp) -> Allocation:
        """Adopts the longest cached prefix, one token at least being left to compute."""
        path = self.longest(operation.tokens[:-1])
        self.pin(path, 1)
        blocks = self.take(-(-len(operation.tokens) // self.size) - len(path))
        if blocks is None:
            self.pin(path, -1)
            return Allocation(0, None)
        self.requests[operation.id] = Request(operation.tokens, path, blocks)
        return Allocation(len(path) * self.size, [*(node.block for node in path), *blocks])

    def append(self, operation: AppendOp) -> Allocation:
        """Takes blocks for more tokens."""
        request = self.requests[operation.id]
        tokens = request.tokens + operation.tokens
        blocks = self.take(-(-len(tokens) // self.size) - len(request.path) - len(request.blocks))
        if blocks is not None:
            self.requests[operation.id] = Request(tokens, request.path, request.blocks + blocks)
        return Allocation(0, blocks)

    def free(self, operation: FreeOp) -> None:
        """Enters whole blocks into the tree; those that it has already, and the rest, are free."""
        request = self.requests.pop(operation.id)
        self.pin(request.path, -1)
        node, known, entered = self.root, len(request.path), set[int]()
        for index, page in enumerate(self.pages(request.tokens)[: None if operation.keep else known]):
            if page not in node.children:
                node.children[page] = Node(request.blocks[index - known], node, page)
                entered.add(request.blocks[index - known])
            node = node.children[page]
            self.touch(node)
        self.free_blocks = sorted({*self.free_blocks, *request.blocks} - entered)

    def state(self, operation: StateOp) -> State:
        """Everything there is."""
        cached = [[node.block, node.parent.block, node.users] for node in self.nodes() if node.parent]
        return State(sorted(self.free_blocks), sorted(cached))

    def take(self, count: int) -> list[int] | None:
        """So many blocks, leaves evicted for them; None, and nothing changes, where there are not so many."""
        if count > len(self.free_blocks) + sum(not node.users for node in self.nodes()) - 1:  # the root is no block
            return None
        while len(self.free_blocks) < count:
            leaves = (node for node in self.nodes() if node.parent and not node.children and not node.users)
            victim = min(leaves, key=lambda node: (node.used, node.block))
            assert victim.parent is not None
            heapq.heappush(self.free_blocks, victim.parent.children.pop(victim.page).block)
            self.evictions += 1
        return [heapq.heappop(self.free_blocks) for _ in range(count)]

    def pin(self, path: list[Node], users: int) -> None:
        """These have so many users more."""
        for node in path:
            node.users += users

    def touch(self, node: Node) -> None:
        """A request that used it ends."""
        node.used = self.clock

    def longest(self, tokens: list[int]) -> list[Node]:
        """Nodes of the longest cached prefix."""
        path = [self.root]
        for page in self.pages(tokens):
            if page not in path[-1].children:
                break
            path.append(path[-1].children[page])
        return path[1:]

    def pages(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The tokens of each whole block."""
        return list(zip(*[iter(tokens)] * self.size, strict=False))

    def nodes(self) -> Iterator[Node]:
        """The root, and every cached block."""
        waiting = [self.root]
        while waiting:
            yield (node := waiting.pop())
            waiting += node.children.values()


class ForgetfulCache(RadixCache):
    """Cache that evicts first what was entered first, whether or not it was used since."""

    def touch(self, node: Node) -> None:
        """The defect."""
        node.used = node.used or self.clock

"""An operation with the tree before and after it, and the story of requests so far, which states do not tell.

A state has slots of requests, not their tokens, and counts of locks, not whose they are. The story has both, of the
operations and of what was answered: it says which nodes a request holds, and by whom a node was entered.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from hkv.contract.invariant import PlainMoment, PlainWatch
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import SGLangConfig

Unit: TypeAlias = int | tuple[int, int]
"""A token, or a token and the next one."""

Namespace: TypeAlias = tuple[str | None, str | None]
"""SGLang's `extra_key` (an adapter's, say) and `cache_salt`."""

Path: TypeAlias = tuple[Namespace, tuple[Unit, ...]]
"""A prefix: its namespace and its units."""

SHOWN = 6
"""Tokens of a node that are shown."""


class Place(NamedTuple):
    """A node where it stands.

    Attributes:
      number: of it in the state; `node`: itself.
      start: units before it; `path`: the prefix that ends with it.
      edge: the prefix before it and its first page, which it keeps when its end is split off.
    """

    number: int
    node: structs.TreeNode
    start: int
    path: Path
    edge: Path

    @property
    def end(self) -> int:
        """Units up to its end."""
        return len(self.path[1])

    def on(self, path: Path) -> bool:
        """True if a prefix has the node whole."""
        return path[0] == self.path[0] and path[1][: self.end] == self.path[1]


class Tree:
    """Nodes of a state by where they stand.

    Attributes:
      places: by number.
      ends: by the prefix that ends with them.
      parents: numbers of nodes that others come after.
    """

    def __init__(self, config: SGLangConfig, state: structs.State) -> None:
        self.state, self._config = state, config
        self.places: list[Place] = []
        for number, node in enumerate(state.nodes or ()):
            before = self.places[node.parent].path[1] if node.parent >= 0 else ()
            units = before + units_of(node.tokens, config)
            first = units[: len(before) + config.page_size]
            path, edge = (node.namespace, units), (node.namespace, first)
            self.places.append(Place(number, node, len(before), path, edge))
        self.ends = {each.path: each for each in self.places}
        self.parents = {each.node.parent for each in self.places}
        self._edges = {each.edge: each for each in self.places}

    def along(self, path: Path) -> Iterator[tuple[Place, int]]:
        """Nodes of a prefix, the nearest to the root first, and of how many of its units each is the end: of the last
        one the whole pages that are alike."""
        namespace, units = path
        size, end = self._config.page_size, 0
        while len(units) >= end + size and (place := self._edges.get((namespace, units[: end + size]))):
            pairs = zip(place.path[1], units, strict=False)
            alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            yield place, alike // size * size
            if alike < place.end:
                return
            end = place.end

    def whole(self, path: Path) -> list[Place]:
        """Nodes that are whole in a prefix, the nearest to the root first."""
        return [place for place, end in self.along(path) if end == place.end]

    def part_of(self, place: Place) -> Place | None:
        """Node that has, or had, all that a node of another state has; None if none."""
        found = [each for each, end in self.along(place.path) if end == place.end]
        return found[-1] if found and found[-1].start <= place.start else None

    def is_leaf(self, place: Place) -> bool:
        """True if nothing comes after a node, and nobody holds it."""
        return place.number not in self.parents and not any(place.node.locks)


def units_of(tokens: Sequence[int], config: SGLangConfig) -> tuple[Unit, ...]:
    """Units of tokens."""
    return tuple(itertools.pairwise(tokens)) if config.bigrams else tuple(tokens)


class Receipt(NamedTuple):
    """Part of the tree that a request holds.

    Attributes:
      path: the prefix.
      window: units before the part of it whose window slots are held; those of whole nodes.
      marked: whether the window ends before the root.
      released: whether the window's part and the state's were given back.
    """

    path: Path
    window: int
    marked: bool
    released: bool = False

    def holds(self, place: Place, component: int) -> bool:
        """True if a component of a node is held: full slots, window slots or the state."""
        if not component or self.released:
            return not component and place.on(self.path)
        return place.on(self.path) and (place.start >= self.window if component == 1 else place.path == self.path)


@dataclasses.dataclass
class Known:
    """A running request: its tokens, how many of them came with it, and what it holds.

    `branch`: units at which its first entry ends, for the sake of the window; 0 for none. `kept`: lengths of the states
    that it kept since it was entered, the last one first, and before a decoded token's the one before.
    """

    tokens: list[int]
    prompt: int
    namespace: Namespace
    priority: int
    branch: int
    receipt: Receipt
    kept: list[int] = dataclasses.field(default_factory=list[int])


class Story:
    """Requests of a run so far.

    Attributes:
      config: of the cache.
      requests: those that run, by name.
      entered: prefixes that were entered and by whom, the last one last.
      edges: of nodes at which somebody's window was seen to end.
    """

    def __init__(self, header: structs.Header) -> None:
        self.config = structs.to_config(header)
        self.requests: dict[str, Known] = {}
        self.entered: dict[Path, str] = {}
        self.edges: set[Path] = set()

    def follow(self, moment: Moment) -> None:
        """Takes note of an operation and its answer."""
        operation, tree = moment.operation, moment.tree
        self.edges = {each.edge for each in tree.places if each.edge in self.edges}
        match operation, moment.answer:
            case structs.AdmitOp(), structs.Found(hit=hit, full=full):
                units = units_of(operation.tokens, self.config)[:hit]
                branches = self.config.window is not None and self.config.states is None and full > hit
                receipt = self._locked(tree, (operation.namespace, units))
                given = (operation.namespace, operation.priority, full if branches else 0, receipt)
                self.requests[operation.id] = Known(list(operation.tokens), len(operation.tokens), *given)
            case structs.ExtendOp(), structs.Slots(slots=list()) if operation.track:
                self.requests[operation.id].kept = [operation.track]
            case structs.DecodeOp(), structs.Slots(slots=list()):
                known = self.requests[operation.id]
                known.tokens.append(operation.token)
                if operation.track:
                    known.kept = [len(known.tokens), *known.kept[:1]]
            case structs.ReleaseWindowOp(), _:
                known = self.requests[operation.id]
                known.receipt = known.receipt._replace(released=known.receipt.released or known.receipt.marked)
            case structs.CheckpointOp() | structs.FinishOp(), _ if moment.entry is not None:
                known = self.requests[operation.id]
                self.entered.pop(moment.entry.path, None)
                self.entered[moment.entry.path] = operation.id
                known.receipt = self._locked(tree, moment.entry.path)
                known.branch = 0 if moment.entry.branches else known.branch
            case _:
                pass
        if isinstance(operation, structs.CheckpointOp):
            self.requests[operation.id].kept = []
        if isinstance(operation, structs.FinishOp | structs.AbortOp):
            del self.requests[operation.id]

    def _locked(self, tree: Tree, path: Path) -> Receipt:
        window, nodes = self.config.window or 0, tree.whole(path)
        for place in reversed(nodes):
            if len(path[1]) - place.start >= window > 0:
                self.edges.add(place.edge)
                return Receipt(path, place.start, True)
        return Receipt(path, 0, False)

    def called(self, place: Place) -> str:
        """A node in a few words: its number, who entered it last, and its tokens."""
        by = next((id for path, id in reversed(self.entered.items()) if place.on(path)), None)
        tokens = ", ".join(map(str, place.node.tokens[:SHOWN])) + ", ..." * (len(place.node.tokens) > SHOWN)
        return f"node {place.number} ({by + chr(39) + 's ' if by else ''}[{tokens}])"


class Entry(NamedTuple):
    """A prefix that a request enters.

    Attributes:
      path: the prefix that is the tree's afterwards.
      owned: units of it that were the tree's before.
      counted: units of it that the request had entered before.
      priority: of the request.
      prompt: units of the prompt where that is parted and kept longer; else 0.
      branches: whether it ends where the window's part of a prefix was missing.
    """

    path: Path
    owned: int
    counted: int
    priority: int
    prompt: int
    branches: bool


@dataclasses.dataclass(frozen=True)
class Moment(PlainMoment):
    """An operation, with the trees before and after it.

    Attributes:
      story: up to the operation; of what it locks, with it.
    """

    story: Story

    @functools.cached_property
    def tree(self) -> Tree:
        """Nodes afterwards."""
        return Tree(self.config, self.after)

    @functools.cached_property
    def earlier(self) -> Tree:
        """Nodes before."""
        return Tree(self.config, self.before)

    @property
    def config(self) -> SGLangConfig:
        """Configuration of the cache."""
        return self.story.config

    @functools.cached_property
    def found(self) -> Path | None:
        """Key that a `match` or an `admit` looked for, in whole pages; None for other operations."""
        if not isinstance(self.operation, structs.MatchOp | structs.AdmitOp):
            return None
        tokens = self.operation.tokens
        units = units_of(tokens[:-1] if isinstance(self.operation, structs.AdmitOp) else tokens, self.config)
        return self.operation.namespace, units[: len(units) // self.config.page_size * self.config.page_size]

    @functools.cached_property
    def entry(self) -> Entry | None:
        """Prefix that a `checkpoint` or a `finish` enters; None for others, and without a state to enter it with."""
        operation = self.operation
        if not isinstance(operation, structs.CheckpointOp | structs.FinishOp):
            return None
        known, owned = self.story.requests[operation.id], self.before.requests[operation.id]
        length = getattr(operation, "length", 0) or len(owned.slots)
        branches = owned.protected < known.branch and known.branch + self.config.bigrams <= length
        if branches:
            length = known.branch + self.config.bigrams
        if self.config.tracked:
            # Of a request that ended before its last pass, the state before the last may be the one.
            length = next((kept for kept in known.kept if kept <= length), 0)
            if not length:
                return None
        size = self.config.page_size
        units = units_of(known.tokens[:length], self.config)
        path = known.namespace, units[: len(units) // size * size]
        prompt = len(units_of(known.tokens[: known.prompt], self.config)) // size * size
        parts = self.config.window is None and self.config.states is None and 0 < prompt < len(path[1])
        return Entry(path, owned.protected, owned.entered, known.priority, prompt if parts else 0, branches)


class Watch(PlainWatch):
    """An engine that performs operations, and its story."""

    def __init__(self, engine: Any, header: structs.Header, *given: Any) -> None:
        super().__init__(engine, header, *given)
        self._story = Story(header)

    def moment(self, operation: Any, answer: Any, after: structs.State) -> Moment:
        found = Moment(self._header, operation, answer, self._state, after, self._story)
        self._story.follow(found)
        return found

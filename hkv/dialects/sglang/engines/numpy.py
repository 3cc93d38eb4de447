"""The reference as an engine: `reference.dialects.sglang` behind the operations of its logs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import COMPONENTS, MAMBA, SWA
from hkv.dialects.sglang.engines import of_components, places, walk
from hkv.dialects.sglang.log import to_config
from hkv.errors import OperationError
from hkv.version import check_reference

if TYPE_CHECKING:
    from reference.dialects.sglang.core import TreeCore
    from reference.dialects.sglang.key import Namespace
    from reference.dialects.sglang.manager import SGLangManager
    from reference.dialects.sglang.tree import RadixTree, TreeNode


class SGLangNumpyEngine:
    """The reference under SGLang's rules.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      header: the same.
      manager: the reference's object, for inspection.

    Raises:
      ConfigError: a cache that SGLang does not have.
    """

    manager: SGLangManager

    def __init__(self, header: structs.Header) -> None:
        check_reference()
        from reference.dialects.sglang.manager import SGLangManager

        self.header, self.manager = header, SGLangManager(to_config(header))

    @property
    def evictions(self) -> int:
        """Times that a node left, or lost what a component had of it, to make room."""
        return self.manager.tree.evictions

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now; nothing changed.
        """
        manager = self.manager
        match operation:
            case structs.MatchOp():
                return _found(manager.match(operation.tokens, operation.namespace))
            case structs.AdmitOp():
                given = (operation.tokens, operation.namespace, operation.priority)
                return _found(manager.admit(operation.id, *given))
            case structs.ExtendOp():
                return structs.Slots(manager.extend(operation.id, operation.length, operation.track))
            case structs.DecodeOp():
                slot = manager.decode(operation.id, operation.token, track=operation.track)
                return structs.Slots(None if slot is None else [slot])
            case structs.SlideOp():
                manager.slide(operation.id, operation.every)
            case structs.CheckpointOp():
                manager.checkpoint(operation.id)
                request = manager.requests[operation.id]
                return structs.Row(list(request.row), request.protected)
            case structs.ReleaseWindowOp():
                manager.release_window(operation.id)
            case structs.FinishOp():
                manager.finish(operation.id, operation.length)
            case structs.AbortOp():
                manager.abort(operation.id)
            case structs.EvictOp():
                wanted = dict(zip(manager.config.components, operation.tokens, strict=True))
                return structs.Freed(list(manager.evict(wanted).values()))
            case structs.RoomOp():
                return structs.Room(*(list(counts.values()) for counts in manager.room(operation.tokens)))
            case structs.EventsOp():
                return structs.Told(*(list(counts.values()) for counts in manager.tree.told.take()))
            case _:
                return _state(manager)
        return None

    def num_available(self) -> int:
        """Pages of all pools, and states, that are free or that nobody holds."""
        pools, ledgers = self.manager.pools, self.manager.tree.ledgers().values()
        counts = zip(pools.all, pools.available.values(), ledgers, strict=True)
        return sum((free + idle) // pool.page_size for pool, free, (idle, _) in counts)

    def alone(self, tokens: Sequence[int], namespace: Namespace, name: str) -> int:
        """Tokens at which one component alone, and full attention, could resume; nothing is changed."""
        manager = copy.deepcopy(self.manager)
        only = {"window": None, "num_slots": manager.config.num_slots[:1]} if name != SWA else {}
        changes: dict[str, Any] = {**only, **({"states": None} if name != MAMBA else {})}
        manager.tree.config = dataclasses.replace(manager.config, **changes)
        return manager.match(tokens, namespace).length

    def walk(self) -> Iterator[TreeNode]:
        """Nodes of the tree in the order in which `state` lists them."""
        return _walk(self.manager.tree)


class SGLangNumpyTree:
    """The reference's tree alone, whose pools are somebody else's.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      header: the same.
      core: the reference's own object.
    """

    core: TreeCore

    def __init__(self, header: structs.Header) -> None:
        check_reference()
        from reference.dialects.sglang.core import TreeCore

        self.header, self.core = header, TreeCore(to_config(header))

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it is not one on a tree, or cannot come now; nothing changed.
        """
        core = self.core
        match operation:
            case structs.MatchOp():
                found = core.match(operation.tokens, operation.namespace)
                if operation.node is not None:
                    core.nodes[operation.node] = found.node
                return _found(found)
            case structs.InsertOp():
                return self._insert(operation)
            case structs.LockOp():
                return structs.Held(core.lock(operation.id, operation.node))
            case structs.UnlockOp():
                core.unlock(operation.id)
            case structs.ReleaseWindowOp():
                core.release_window(operation.id)
            case structs.ReleaseStateOp():
                core.release_state(operation.id)
            case structs.LeaveOp():
                core.leave(COMPONENTS[structs.KINDS.index(operation.kind)], operation.steps)
                return structs.Gone(*core.take_returned())
            case structs.ResetOp():
                core.reset()
            case structs.EndedOp():
                pass
            case structs.StateOp():
                return structs.State([], [], {}, *_nodes(core.tree), _ledgers(core.tree))
            case _:
                raise OperationError("op", type(operation).__name__, "an operation on a tree alone")
        return None

    def _insert(self, operation: structs.InsertOp) -> structs.Entered:
        names = ("owned", "evicted", "counted", "priority", "state")
        given = {name: getattr(operation, name) for name in names}
        slots, window = list(operation.slots), operation.window
        inserted = self.core.insert(operation.tokens, operation.namespace, slots, window, **given)
        self.core.nodes[operation.node] = inserted.node
        return structs.Entered(inserted.known, inserted.took_state, structs.Gone(*self.core.take_returned()))


def engine(header: structs.Header) -> SGLangNumpyEngine | SGLangNumpyTree:
    """The reference under a header: the whole cache, or its tree alone."""
    return SGLangNumpyTree(header) if header.tree else SGLangNumpyEngine(header)


def _walk(tree: RadixTree) -> Iterator[TreeNode]:
    return walk(tree.root, lambda node: (node.key.namespace, node.key.tokens()))


def _found(match: Any) -> structs.Found:
    return structs.Found(match.length, match.full_length, match.node.slots())


def _nodes(tree: RadixTree) -> tuple[list[structs.TreeNode], list[list[int]]]:
    """Nodes of a tree, and the orders of their window slots and states."""
    config, nodes = tree.config, list(_walk(tree))
    numbers = {node: number for number, node in enumerate(nodes)}
    used = places(node.used for node in [tree.root, *nodes])
    made = places(node.made for node in nodes)
    told = [
        structs.TreeNode(
            parent=-1 if node.parent is None else numbers.get(node.parent, -1),
            namespace=node.key.namespace,
            tokens=node.key.tokens(),
            slots=list(node.full),
            window=None if node.window is None else list(node.window),
            state=node.state,
            locks=of_components(config, node.full_locks, node.window_locks, node.state_locks),
            mark=node.mark is not None,
            hits=node.hits,
            priority=node.priority,
            used=used[node.used],
            made=made[node.made],
        )
        for node in nodes
    ]
    orders = of_components(config, [], tree.recent, tree.recent_states)[1:]
    return told, [[numbers[node] for node in order] for order in orders]


def _state(manager: SGLangManager) -> structs.State:
    pools = manager.pools
    return structs.State(
        [structs.Pool(list(pool.free), list(pool.waiting)) for pool in pools.all],
        sorted(pools.window_of.items()),
        {
            id: structs.Owned(
                list(request.row),
                request.protected,
                request.counted,
                request.evicted,
                [state for state in (request.own, *request.tracking) if state is not None],
                request.tracked,
            )
            for id, request in manager.requests.items()
        },
        *_nodes(manager.tree),
        _ledgers(manager.tree),
    )


def _ledgers(tree: RadixTree) -> list[structs.Ledger]:
    return [structs.Ledger(*counts) for counts in tree.ledgers().values()]

"""The reference as an engine: `reference.dialects.sglang` behind the operations of its logs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import MAMBA, SWA
from hkv.dialects.sglang.engines import of_components, places, walk
from hkv.dialects.sglang.log import to_config
from hkv.version import check_reference

if TYPE_CHECKING:
    from reference.dialects.sglang.key import Namespace
    from reference.dialects.sglang.manager import Manager
    from reference.dialects.sglang.tree import Node


class SGLangNumpyEngine:
    """The reference under SGLang's rules.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      header: the same.
      manager: the reference's own object, for those who want to look inside.

    Raises:
      ConfigError: a cache that SGLang does not have.
    """

    manager: Manager

    def __init__(self, header: structs.Header) -> None:
        check_reference()
        from reference.dialects.sglang.manager import Manager

        self.header, self.manager = header, Manager(to_config(header))

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
                manager.finish(operation.id)
            case structs.AbortOp():
                manager.abort(operation.id)
            case structs.EvictOp():
                wanted = dict(zip(manager.config.components, operation.tokens, strict=True))
                return structs.Freed(list(manager.evict(wanted).values()))
            case _:
                return _state(self)
        return None

    def num_available(self) -> int:
        """Pages of all pools, and states, that are free or that nobody holds."""
        manager, nodes = self.manager, self.manager.tree.nodes()
        free = sum(pool.available // pool.page_size for pool in manager.pools.all)
        full = sum(len(node.full) for node in nodes if not node.full_locks)
        window = sum(len(node.window or ()) for node in nodes if not node.window_locks)
        states = sum(node.state is not None and not node.state_locks for node in nodes)
        return free + (full + window) // manager.config.page_size + states

    def alone(self, tokens: Sequence[int], namespace: Namespace, name: str) -> int:
        """Tokens at which one component alone, and full attention, could resume; nothing is changed."""
        manager = copy.deepcopy(self.manager)
        only = {"window": None, "num_slots": manager.config.num_slots[:1]} if name != SWA else {}
        changes: dict[str, Any] = {**only, **({"states": None} if name != MAMBA else {})}
        manager.tree.config = dataclasses.replace(manager.config, **changes)
        return manager.match(tokens, namespace).length

    def walk(self) -> Iterator[Node]:
        """Nodes of the tree in the order in which `state` lists them."""
        return walk(self.manager.tree.root, lambda node: (node.key.namespace, node.key.tokens()))


def _found(match: Any) -> structs.Found:
    return structs.Found(match.length, match.full_length, match.node.slots())


def _state(engine: SGLangNumpyEngine) -> structs.State:
    manager = engine.manager
    tree, config, nodes = manager.tree, manager.config, list(engine.walk())
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
    pools = manager.pools
    return structs.State(
        pools=[structs.Pool(list(pool.free), list(pool.waiting)) for pool in pools.all],
        window=sorted(pools.window_of.items()),
        requests={
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
        nodes=told,
        recent=[
            [numbers[node] for node in order]
            for order in of_components(config, [], tree.recent, tree.recent_states)[1:]
        ],
    )

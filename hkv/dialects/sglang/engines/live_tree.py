"""The nodes of SGLang's tree in Python, read from its core; nothing of SGLang is imported for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import FULL, MAMBA, SWA, SGLangConfig
from hkv.dialects.sglang.engines import places, walk


def tree(core: Any, config: SGLangConfig) -> tuple[list[structs.TreeNode], list[list[int]]]:
    """Nodes of a core (`UnifiedTreeCore`), and the orders of their window slots and states.

    A node that lost what every node has is told of as it is: a difference, not an error of the reader.
    """
    nodes = list(
        walk(core.root_node, lambda node: ((node.key.extra_key, node.key.cache_salt), list(node.key.token_ids)))
    )
    numbers = {node.id: number for number, node in enumerate(nodes)}
    used = places([core.root_node.last_access_time, *(node.last_access_time for node in nodes)])
    ages = places([node.creation_time for node in nodes])
    types = {component.name: component for component in core.components_by_type}
    told = []
    for node in nodes:
        parts = {name: node.component_data[component] for name, component in types.items()}
        slots = {name: None if part.value is None else part.value.tolist() for name, part in parts.items()}
        state = slots.get(MAMBA)
        told.append(
            structs.TreeNode(
                parent=numbers.get(node.parent.id, -1),
                namespace=(node.key.extra_key, node.key.cache_salt),
                tokens=list(node.key.token_ids),
                slots=slots[FULL] or [],
                window=slots.get(SWA),
                state=None if state is None else state[0],
                locks=[parts[name].lock_ref for name in config.components],
                mark=SWA in parts and parts[SWA].metadata.get("uuid") is not None,
                hits=node.hit_count,
                priority=node.priority,
                used=used[node.last_access_time],
                made=ages[node.creation_time],
            )
        )
    orders = (_recent(core.lru_lists[types[name]]) for name in config.components[1:])
    return told, [[numbers.get(id, -1) for id in order] for order in orders]


def _recent(order: Any) -> Iterator[int]:
    node = order.head.lru_next[order._pt]
    while node is not order.tail:
        yield node.id
        node = node.lru_next[order._pt]

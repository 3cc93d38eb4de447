"""A cache under watch at one point of an exploration: copies of it, and its name."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.explorer.space import RtpSpace
from hkv.dialects.rtp_llm.invariants.watch import RtpWatch
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.configuration import to_rtp_header
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpOp
from hkv.model.group_policy import GroupPolicy
from hkv.model.topology import Topology
from hkv.oracle.invariant import Invariant

CONSTANT = (RtpConfig, Topology, GroupPolicy, Invariant)
"""Objects that no operation changes: copies share them, and names leave them out."""

NAMELESS = frozenset({"mapper", "kinds", "kind", "pool", "_evictable", "version", "evictions", "_clock", "access"})
"""Attributes that say nothing of what comes next: rules, second references, counters. Names have the order of use."""


class World:
    """The reference and all that its watch remembers.

    Args:
      space: the cache and its operations.
    """

    def __init__(self, space: RtpSpace) -> None:
        header = to_rtp_header(space.config, "core")
        self._engine = RtpNumpyEngine(header)
        self._watch = RtpWatch(self._engine, header)
        self._grown: set[str] = set()

    @property
    def evictions(self) -> int:
        """Blocks that were evicted so far."""
        return self._engine.evictions

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Performs one operation and asks every invariant.

        Raises:
          InvariantError: one does not hold after it.
          Exception: whatever the engine raises.
        """
        if isinstance(operation, structs.AppendOp):
            self._grown.add(operation.id)
        elif isinstance(operation, structs.MallocOp | structs.FreeOp):
            self._grown.discard(operation.id)
        return self._watch.perform(operation)

    def operations(self, space: RtpSpace) -> Iterator[RtpOp]:
        """The operations that may come next."""
        lengths = {id: len(record.tokens[0]) for id, record in sorted(self._watch.ledger.requests.items())}
        state = self._watch.state
        return space.operations(lengths, frozenset(state.lists), self._grown, cached=bool(state.cached))

    def name(self) -> tuple[Any, ...]:
        """All that a rule or an invariant can read; requests are in an order of their own, whatever they are called.

        Blocks have their numbers, as the smallest free one is handed out first. Of what keys were entered behind, only
        that of cached ones is read.
        """
        manager, ledger = self._engine.manager, self._watch.ledger
        seen: dict[int, Any] = {}
        requests = [
            (_named(request, seen), _named(ledger.requests.get(id), seen), id in self._grown)
            for id, request in manager.requests.items()
        ]
        cached = manager.allocator.cache.items
        parents = tuple(sorted((key, str(parent)) for key, parent in ledger.parents.items() if key in cached))
        kept = [_named(each, seen) for each in (ledger.held, ledger.exported, ledger.resident, ledger.unsure)]
        return (*sorted(requests, key=repr), _named(manager.allocator, seen), parents, *kept)


class Copies:
    """Worlds as bytes, but for what none of them changes."""

    def __init__(self) -> None:
        self._constants: dict[int, Any] = {}

    def save(self, world: World) -> bytes:
        """A world as bytes."""
        constants = self._constants

        class Saver(pickle.Pickler):
            def persistent_id(self, obj: Any) -> int | None:
                if not isinstance(obj, CONSTANT):
                    return None
                constants[id(obj)] = obj
                return id(obj)

        buffer = io.BytesIO()
        Saver(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
        return buffer.getvalue()

    def load(self, saved: bytes) -> World:
        """A world of its own from bytes."""
        constants = self._constants

        class Loader(pickle.Unpickler):
            def persistent_load(self, pid: int) -> Any:
                return constants[pid]

        return Loader(io.BytesIO(saved)).load()


def _named(value: Any, seen: dict[int, Any]) -> Any:
    """A value as tuples that are equal if and only if the values are; attributes of objects but for `NAMELESS`."""
    if value is None or isinstance(value, int | str | bool):
        return value
    if id(value) not in seen:
        seen[id(value)] = (value, _new_name(value, seen))  # the value too, so that no other one gets its id
    return seen[id(value)][1]


def _new_name(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, CONSTANT):
        return None
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if isinstance(value, Counter):
        return tuple(sorted((tuple(sorted(key)), count) for key, count in value.items() if count))
    if isinstance(value, set | frozenset):
        return tuple(sorted(_named(each, seen) for each in value))
    if isinstance(value, Mapping):
        return tuple((_named(key, seen), _named(each, seen)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_named(each, seen) for each in value)
    fields = dict(vars(value))
    if "_dependencies" in fields:
        fields["_dependencies"] = value.dependencies  # computed when they are first asked for
    if "nodes" in fields:
        fields["nodes"] = dict(sorted(value.nodes.items(), key=lambda named: named[1].access))
    return tuple(_named(each, seen) for name, each in fields.items() if name not in NAMELESS)

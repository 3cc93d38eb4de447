"""`hkv explore` under RTP-LLM's rules: the NumPy reference, with every invariant that `hkv watch` asks.

A world is the reference with its watch; `hkv.oracle.exploration` searches breadth-first through what it can become.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from hkv.contract.explore_command import TOKENS, ExploreCommand, SizeOptions, Space, World, check_small, space_of
from hkv.contract.invariant import Invariant
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.invariants.moment import RtpWatch
from hkv.dialects.rtp_llm.log import RtpAnswer, RtpHeader, RtpOp, to_rtp_header
from hkv.dialects.rtp_llm.plain import cached
from hkv.dialects.rtp_llm.replay_command import RtpReplayOptions, check_eviction, config_of_groups
from hkv.errors import ConfigError
from hkv.model.group_policy import GroupPolicy
from hkv.model.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpExploreOptions(RtpReplayOptions, SizeOptions):
    """The size of a space, and how its cache evicts."""


class RtpExploreCommand(ExploreCommand):
    """Small caches of RTP-LLM's."""

    declared = RtpExploreOptions

    def world(self, options: dict[str, Any]) -> tuple[RtpHeader, World]:
        check_eviction(options)
        if options["watermark"]:
            raise ConfigError("--watermark", options["watermark"], f"0: {options['dialect']} has --reserve-ratio")
        world = RtpWorld(config_of_groups(options, (options["num_blocks"],)), space_of(options))
        return world.header, world


CONSTANT = (RtpConfig, Topology, GroupPolicy, Invariant, Space)
"""Objects that no operation changes: copies share them, and canonical states leave them out."""


class RtpWorld:
    """The reference and all that its watch remembers.

    Args:
      config: the cache.
      space: the traffic that it may see; requests are of one sequence each.

    Raises:
      ConfigError: a pool is too large.
    """

    def __init__(self, config: RtpConfig, space: Space) -> None:
        for count in config.num_blocks:
            check_small("num_blocks", count)
        self.header = to_rtp_header(config, "core")
        self._space = space
        self._engine = RtpNumpyEngine(self.header)
        self._watch = RtpWatch(self._engine, self.header)
        self._grown: set[str] = set()

    @property
    def evictions(self) -> int:
        return self._engine.evictions

    def perform(self, operation: RtpOp) -> RtpAnswer:
        if isinstance(operation, structs.AppendOp):
            self._grown.add(operation.id)
        elif isinstance(operation, structs.MallocOp | structs.FreeOp):
            self._grown.discard(operation.id)
        return self._watch.perform(operation)

    def refused(self, answer: RtpAnswer) -> bool:
        return isinstance(answer, structs.Malloc) and answer.verdict != "granted"

    def operations(self) -> Iterator[RtpOp]:
        state, ledger = self._watch.state, self._watch.ledger
        lengths = {id: len(record.tokens[0]) for id, record in sorted(ledger.requests.items())}
        free = next((name for name in self._space.names() if name not in lengths), None)
        if free is not None:
            yield from (structs.RequestOp(id=free, tokens=tokens) for tokens in self._space.prompts())
        for id, length in lengths.items():
            yield structs.MallocOp(id=id)
            if id not in state.lists:
                yield structs.MallocOp(id=id, device_cache=False)
                yield structs.DropOp(id=id)
                continue
            if length < self._space.max_model_len:
                yield from (structs.AppendOp(id=id, tokens=[[token]]) for token in TOKENS)
            if id not in self._grown:  # its keys are old until a `malloc` has seen the new tokens
                yield structs.InsertOp(id=id)
            yield structs.FreeOp(id=id)
        if state.cached:
            yield structs.EvictOp(least=1)

    def name(self) -> Hashable:
        """All that a rule or an invariant can read; requests are in an order of their own, whatever they are called.

        Blocks have their numbers, as the smallest free one is handed out first. Of what keys were entered behind, only
        that of cached ones is read.
        """
        engine, ledger = self._engine, self._watch.ledger
        seen: dict[int, Any] = {}
        requests = [
            (_request(engine, id), _named(ledger.requests.get(id), seen), id in self._grown) for id in engine.requests
        ]
        parents = tuple(sorted((key, str(parent)) for key, parent in ledger.parents.items() if engine.key(key)))
        kept = [_named(each, seen) for each in (ledger.held, ledger.exported, ledger.resident, ledger.unsure)]
        return (*sorted(requests, key=repr), _cache(engine), parents, *kept)

    def copies(self) -> Callable[[], World]:
        """Worlds out of bytes, which are quicker to copy, but for what none of them changes."""
        constants: dict[int, Any] = {}

        class Saver(pickle.Pickler):
            def persistent_id(self, obj: Any) -> int | None:
                if not isinstance(obj, CONSTANT):
                    return None
                constants[id(obj)] = obj
                return id(obj)

        class Loader(pickle.Unpickler):
            def persistent_load(self, pid: int) -> Any:
                return constants[pid]

        buffer = io.BytesIO()
        Saver(buffer, pickle.HIGHEST_PROTOCOL).dump(self)
        saved = buffer.getvalue()
        return lambda: Loader(io.BytesIO(saved)).load()


def _request(engine: RtpNumpyEngine, id: str) -> Hashable:
    """All that is read of a request: its tokens and keys, lengths, and lists."""
    host, request = engine.requests[id], engine.request(id)
    rows = [(row.count, row.aligned) for row in request.rows[: request.batch]]
    lengths = request.tokens, request.common, request.reserve
    return repr((host.tokens, host.keys, host.partial, lengths, rows, engine.rows(id)))


def _cache(engine: RtpNumpyEngine) -> Hashable:
    """All that is read of pools and cache, but for counters; times stand in order of use."""
    state, names = engine.state(), engine.names
    items = [
        (names[key], key.blocks, key.resident, key.canonical, key.ordinal, names.get(key.parent))
        for key in cached(engine.cache)
    ]
    present = sorted((node for node in engine.cache.nodes[1:] if node.present), key=lambda node: node.used)
    nodes = [
        (names[node.key], node.canonical, node.parent and (names[node.parent.key], node.parent.canonical))
        for node in present
    ]
    return repr((state.pools, items, nodes))


def _named(value: Any, seen: dict[int, Any]) -> Any:
    """A value as tuples that are equal if and only if the values are; attributes of objects."""
    if value is None or isinstance(value, int | str | bool):
        return value
    if id(value) not in seen:
        seen[id(value)] = (value, _new_name(value, seen))  # the value too, so that no other one gets its id
    return seen[id(value)][1]


def _new_name(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, CONSTANT):
        return None
    if isinstance(value, set | frozenset):
        return tuple(sorted(_named(each, seen) for each in value))
    if isinstance(value, Mapping):
        return tuple((_named(key, seen), _named(each, seen)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_named(each, seen) for each in value)
    return tuple(_named(each, seen) for each in vars(value).values())

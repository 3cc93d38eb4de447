"""Exploring without arrays: the reference stepped one operation at a time, states named by trying every renaming."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.jax_reading import Reader
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact
from hkv.dialects.vllm.explorer.space import Space
from hkv.dialects.vllm.explorer.transition import World, unpack
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import CacheState, Operation
from hkv.model.topology import Topology
from hkv.spec import FullAttention, LayerSpec, SlidingWindow
from hkv.state.state import Request, State

PLAIN = {"lookahead": 0, "external": 0, "must_fit": False, "reserved": 0, "in_flight": 0}


@dataclasses.dataclass(frozen=True)
class Standing:
    """State of a request, by the operations."""

    tokens: tuple[int, ...] = ()
    running: bool = False
    computed: int = 0
    main: int = 0
    processed: int = 0
    found: int | None = None
    granted: bool = False
    owed: bool = False


class Strings:
    """Token strings as the interner that reads a compiled cache's keys."""

    def __init__(self, space: Space) -> None:
        unit = space.config.hash_block_size
        codes = range(space.buckets.keys)
        self.places = [(max(code, 1).bit_length() - 1) // unit - 1 for code in codes]
        self.keys = [code.to_bytes(8, "big") for code in codes]


def cache_state(space: Space, state: State) -> CacheState:
    """State of a compiled cache, as the log format writes it; requests are called 0, 1, ..."""
    return _reader(space).state(jax.device_get(state), {str(slot): slot for slot in range(space.requests)})


@functools.cache
def _reader(space: Space) -> Reader:
    parameters, _ = cache.init(space.config, space.buckets)
    return Reader(space.config, parameters, Strings(space))  # type: ignore[arg-type]


@functools.cache
def unpack_many(space: Space) -> Callable[[Any], World]:
    """`hkv.dialects.vllm.explorer.transition.unpack` of many worlds."""
    return jax.jit(jax.vmap(lambda words: unpack(space, words)))


def standings(world: World) -> list[Standing]:
    """States of the requests of a compiled world."""
    ledger, hits = np.asarray(world.ledger), np.asarray(world.state.requests)[:, Request.HIT]
    found = []
    for slot, row in enumerate(ledger.tolist()):
        looked = row[Fact.FOCUS] == LOOKED_UP
        found.append(
            Standing(
                tokens=tuple(int(bit) for bit in f"{row[Fact.STRING]:b}"[1:]),
                running=bool(row[Fact.RUNNING]),
                computed=row[Fact.COMPUTED],
                main=row[Fact.MAIN],
                processed=row[Fact.PROCESSED],
                found=int(hits[slot]) if looked else None,
                granted=row[Fact.FOCUS] not in (0, LOOKED_UP),
                owed=bool(row[Fact.OWED]),
            )
        )
    return found


def name_of(state: CacheState, requests: list[Standing], keys: dict[str, tuple[int, ...]]) -> Any:
    """The least description of a state under every order of the requests; blocks are named as they come up."""
    return min(_described(state, requests, keys, order) for order in itertools.permutations(range(len(requests))))


def _described(state: CacheState, requests: list[Standing], keys: dict[str, tuple[int, ...]], order: Any) -> Any:
    names = {block: place for place, block in enumerate(state.free, 1)}
    rows = [state.rows.get(str(slot), []) for slot in order]
    for block in (block for row in rows for blocks in row for block in blocks):
        if block:
            names.setdefault(block, len(names) + 1)
    cached = sorted((names[int(block)], group, keys[key]) for block, (group, _, key) in state.cached.items())
    refs = sorted((names[int(block)], count) for block, count in state.refs.items())
    shown = [[[names.get(block, 0) for block in blocks] for blocks in row] for row in rows]
    return (
        len(state.free),
        tuple(cached),
        tuple(refs),
        repr(shown),
        tuple(repr(requests[slot]) for slot in order),
    )


class PlainExplorer:
    """A breadth-first search over the reference.

    Args:
      space: of which evictions, resets and delays are left out.
    """

    def __init__(self, space: Space) -> None:
        assert {"evict", "reset", "delay"} <= space.without
        self._space = space
        self._keys: dict[str, tuple[int, ...]] = {}
        self._learn()

    def explore(self) -> tuple[set[Any], int]:
        """The names of all states, and the number of transitions."""
        engine = NumpyEngine(to_header(self._space.config, "core"))
        blank = [Standing() for _ in range(self._space.requests)]
        seen = {name_of(engine.state(), blank, self._keys)}
        frontier, transitions = [(engine, blank)], 0
        while frontier:
            found = []
            for engine, requests in frontier:
                for slot, operation in self._moves(requests):
                    transitions += 1
                    other, standing = self._performed(engine, requests, slot, operation)
                    name = name_of(other.state(), standing, self._keys)
                    if name not in seen:
                        seen.add(name)
                        found.append((other, standing))
            frontier = found
        return seen, transitions

    def _learn(self) -> None:
        """Learns the prefixes that the reference's keys stand for."""
        config = self._space.config
        for tokens in itertools.product((0, 1), repeat=config.max_model_len):
            engine = NumpyEngine(to_header(config, "core"))
            engine.request("0", tokens, None)
            keys: Any = engine.manager.requests["0"].keys
            for place, key in enumerate(keys, 1):
                self._keys[key[:8].hex()] = tokens[: place * config.hash_block_size]

    def _moves(self, requests: list[Standing]) -> Iterator[tuple[int, Operation]]:
        space, longest = self._space, self._space.config.max_model_len
        for slot, request in enumerate(requests):
            if request.found is not None:
                yield from self._allocations(slot, request, request.found)
                return
            if request.granted:
                yield slot, oplog.AdvanceOp(id=str(slot), tokens=request.main - request.computed)
                return
        empty = [slot for slot, request in enumerate(requests) if not request.tokens][:1]
        for slot in empty:
            for length in range(1, space.prompt + 1):
                for tokens in itertools.product((0, 1), repeat=length):
                    yield slot, oplog.RequestOp(id=str(slot), tokens=list(tokens))
        for slot, request in enumerate(requests):
            id = str(slot)
            if request.running:
                yield from self._allocations(slot, request, 0)
                yield slot, oplog.FreeOp(id=id)
                if request.computed == len(request.tokens) < longest:
                    yield from ((slot, oplog.AppendOp(id=id, tokens=[token])) for token in (0, 1))
            elif request.tokens:
                yield slot, oplog.LookupOp(id=id)
                if "cold" not in space.without:
                    yield from self._allocations(slot, request, 0)
                if "drop" not in space.without:
                    yield slot, oplog.DropOp(id=id)

    def _allocations(self, slot: int, request: Standing, hit: int) -> Iterator[tuple[int, Operation]]:
        left = len(request.tokens) - request.computed - hit
        for new in range(1, left + 1):
            if new == left or "parts" not in self._space.without:
                yield slot, oplog.AllocateOp(id=str(slot), new=new, hit=hit, delay=False, **PLAIN)

    def _performed(
        self, engine: NumpyEngine, requests: list[Standing], slot: int, operation: Operation
    ) -> tuple[NumpyEngine, list[Standing]]:
        other = copy.deepcopy(engine)
        if isinstance(operation, oplog.AllocateOp) and operation.hit:
            other.lookup(str(slot))
        answer: Any = apply(other, operation)
        request = requests[slot]
        new = dataclasses.replace
        match operation:
            case oplog.RequestOp():
                request = Standing(tuple(operation.tokens))
            case oplog.LookupOp():
                request = new(request, found=answer.hit)
            case oplog.AllocateOp() if answer.blocks is None:
                request = new(request, found=None, processed=self._refused(request, operation))
            case oplog.AllocateOp():
                total = request.computed + operation.hit
                main, processed = max(request.main, total + operation.new), max(request.processed, total)
                request = new(request, found=None, running=True, granted=True, main=main, processed=processed)
            case oplog.AdvanceOp():
                request = new(request, granted=False, computed=request.main)
            case oplog.AppendOp():
                request = new(request, tokens=(*request.tokens, *operation.tokens))
            case oplog.FreeOp():
                request = Standing(request.tokens)
            case _:
                request = Standing()
        return other, [request if i == slot else old for i, old in enumerate(requests)]

    @staticmethod
    def _refused(request: Standing, operation: oplog.AllocateOp) -> int:
        return max(request.processed, request.computed) if request.running else 0


# Small spaces for the explorer, of one shape, so that tests share its programs.

CHUNK = 512
GROUPS = (FullAttention(block_size=1), SlidingWindow(block_size=1, window=2))


def space(*specs: LayerSpec, num_blocks: int = 5, length: int = 2, prompt: int = 1, **changes: Any) -> Space:
    """A small space without the operations that make it large."""
    specs = specs or GROUPS
    sizes = [spec.block_size for spec in specs]
    without = frozenset(changes.pop("without", ("evict", "reset", "delay")))
    config = VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=num_blocks,
        hash_block_size=min(sizes),
        scheduler_block_size=max(sizes),
        max_model_len=length,
        **changes,
    )
    return Space(config=config, prompt=prompt, without=without)

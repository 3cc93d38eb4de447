"""The whole first line of a report, with the engine in doubt named first and named second.

Each engine is the reference, but for one answer that it alters, or one thing that it does not hear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import CacheEvent, ExtraKeys, Hit
from hkv.errors import OperationError
from hkv.oracle.comparison import Comparison
from hkv.oracle.record import ALL

changed = msgspec.structs.replace


def altering(operation: str, alter: Callable[[Any], Any]) -> type[NumpyEngine]:
    """The reference with other answers to an operation."""

    def method(self: NumpyEngine, *arguments: Any, **named: Any) -> Any:
        return alter(getattr(NumpyEngine, operation)(self, *arguments, **named))

    return type("Altering", (NumpyEngine,), {operation: method})


def event(kind: str, **fields: Callable[[Any], Any]) -> type[NumpyEngine]:
    """The reference with other fields in events."""

    def alter(events: list[CacheEvent]) -> list[CacheEvent]:
        return [
            changed(each, **{name: alter(getattr(each, name)) for name, alter in fields.items()})
            if each.type == kind and None not in (getattr(each, name) for name in fields)
            else each
            for each in events
        ]

    return altering("events", alter)


def state(alter: Callable[[Any], Any]) -> type[NumpyEngine]:
    """The reference with another state."""
    return altering("state", alter)


def deaf(**fields: Any) -> type[NumpyEngine]:
    """The reference that does not hear what else identifies a request's prefix."""

    def request(self: NumpyEngine, id: str, tokens: Any, extra: ExtraKeys | None, *rest: Any, **more: Any) -> None:
        less = extra and changed(extra, **{name: value for name, value in fields.items() if getattr(extra, name)})
        NumpyEngine.request(self, id, tokens, less, *rest, **more)

    return type("Deaf", (NumpyEngine,), {"request": request})


def failing(operation: str) -> type[NumpyEngine]:
    """The reference that fails at an operation."""

    def method(self: NumpyEngine, *arguments: Any, **named: Any) -> Any:
        raise OperationError("table", 7, "vLLM not to raise KeyError in evict: 7")

    return type("Failing", (NumpyEngine,), {operation: method})


def shorter(found: Hit) -> Hit:
    return Hit(0, [[] for _ in found.blocks], 0)


HEADLINES: dict[str, type[NumpyEngine]] = {
    "eagle 2 0: maximality: after lookup r1: 6 tokens can be resumed from, 0 were found": altering("lookup", shorter),
    "core 2 0: the shared prefix that the lookup of r1 names is of 1 tokens, no multiple of 12: the search comes to no "
    "more than the hit": altering("lookup", lambda hit: changed(hit, shared_prefix=hit.shared_prefix + 1)),
    "core 2 17: the shared prefix that the lookup of r6 names is of 0 tokens: the search comes to 16": altering(
        "lookup", lambda hit: changed(hit, shared_prefix=0)
    ),
    "core 2 0: soundness: after lookup r2: a hit of 12 tokens needs column 0 of group 0, and block 2 there is "
    "not cached": altering(
        "lookup", lambda hit: changed(hit, blocks=[[block + 1 for block in row] for row in hit.blocks])
    ),
    "core 2 0: form: after allocate r1: r1 does not run, and holds [[1]]": altering(
        "allocate", lambda given: changed(given, blocks=None)
    ),
    "core 2 1: form: after allocate r1: r1 was granted blocks, and holds none": altering(
        "allocate", lambda given: changed(given, blocks=given.blocks or [[1]])
    ),
    "core 2 0: r1 gets new blocks [1, 9] in group 0, not [1]": altering(
        "allocate",
        lambda given: (given.blocks and changed(given, blocks=[[*row, 9] for row in given.blocks])) or given,
    ),
    "core 2 0: r1 gets no new block in group 0, not [1]": altering(
        "allocate",
        lambda given: (given.blocks and changed(given, blocks=[row[:-1] for row in given.blocks])) or given,
    ),
    "core 2 0: r1 is to get blocks: vLLM raises KeyError in evict: 7": failing("allocate"),
    "core 2 0: free id=r1: vLLM raises KeyError in evict: 7": failing("free"),
    "core 3 0: an event of stored blocks says medium 'CPU', not 'GPU'": event("stored", medium=lambda medium: "CPU"),
    "core 3 0: removed events say medium CPU, not GPU": event("removed", medium=lambda medium: "CPU"),
    "core 3 0: event fields: after events: key c21349391e4ea4ac is of adapter 'a', and is stored under 'b'": event(
        "stored", lora_name=lambda name: name and "b"
    ),
    "core 2 0: an event of stored blocks says block size 13, not 12": event("stored", block_size=lambda size: size + 1),
    "core 2 0: an event of stored blocks says tokens [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], not [0, 0, 0, 0,"
    " 0, 0, 0, 0, 0, 0, 0, 0]": event("stored", tokens=lambda tokens: [*tokens, 0]),
    "core 3 0: an event of stored blocks says session 'other', not 's'": event(
        "stored", session=lambda session: "other"
    ),
    "core 3 0: event fields: after events: blocks of group 0, mla_attention with window 0, are mamba with 0": event(
        "stored", spec_kind=lambda kind: "mamba"
    ),
    "core 3 0: event fields: after events: the first 12 tokens of r1 are stored without the adapter 'a', the "
    "prompt embeddings '1ff4053048b159385f737fb608b62f7865dca1cbdf7db878237ed7163bc1c905', other than what "
    "their key c21349391e4ea4ac covers": event("stored", extra_keys=lambda keys: [None] * len(keys)),
    "core 1 0: 2 blocks of group 0 are registered, not 1, for 12 tokens of r1": event(
        "stored", num_blocks=lambda number: number + 1
    ),
    "core 2 0: event index: after events: key f33fa81fe530d589 names 24 tokens, outside of its event's 0 to 12": event(
        "stored", parent=lambda parent: ""
    ),
    "core 2 0: event index: after events: no stored event names what is cached, as (group, key): [(0, "
    "'57732c725bb170d5')]": altering("events", lambda events: [each for each in events if each.type != "stored"]),
    "core 2 3: event index: after events: stored by the events, and no block is cached so, as (group, key): "
    "[(1, '45bcb96c0cfb86d6')]": altering("events", lambda events: [each for each in events if each.type != "removed"]),
    "core 1 0: keys of group 0 stay in the index that were to leave it": altering(
        "events", lambda events: [each for each in events if each.type != "removed"]
    ),
    "core 2 0: block 2 stands at place 0 of the queue of free blocks, where block 1 is due": state(
        lambda state: changed(state, free=state.free[::-1])
    ),
    "core 2 0: conservation: after state: 1 blocks are counted as free, and 0 are in the queue": state(
        lambda state: changed(state, free=state.free[1:])
    ),
    "core 2 0: references: after allocate r1: references that no row and no pending copy explains: {1: 1}": state(
        lambda state: changed(state, refs={block: count + 1 for block, count in state.refs.items()})
    ),
    "core 2 0: registration: after allocate r1: block 1 at column 0 of group 0 is full, and has no key": state(
        lambda state: changed(state, cached={})
    ),
    "core 2 0: index: after allocate r1: block 1 is cached as 13 tokens of group 0 under key 57732c725bb170d5,"
    " which is of no prefix that a request ever had": state(
        lambda state: changed(
            state, cached={block: (group, tokens + 1, key) for block, (group, tokens, key) in state.cached.items()}
        )
    ),
    "partial 2 3: references: after copies: copies [] are told, and the references that pending copies hold "
    "are of blocks {1: 1, 3: 1}": altering("copies", lambda copies: copies[1:]),
    "core 2 0: key life: after reset: reset answered True, and blocks [1] keep their keys": altering(
        "reset", lambda done: not done
    ),
    "core 3 0: zeroing: after zeros: blocks [1] were handed out, and are not zeroed": altering(
        "zeros", lambda blocks: blocks[1:]
    ),
    "core 3 0: r1 is offered states none as (group, block, tokens), not [(0, 1, 12)]": altering(
        "offloads", lambda offers: {}
    ),
    "core 4 0: soundness: after connectorlookup r2: a hit of 12 tokens, which is not said to diverge, needs "
    "column 0 of group 0, and block 0 there is not cached": altering(
        "connector_lookup", lambda hit: changed(hit, diverged=not hit.diverged)
    ),
    "core 4 0: connector hits: after connectorlookup r2: group 0 alone can resume at 0 tokens, and is said to "
    "find 1": altering("connector_lookup", lambda hit: changed(hit, hits=[each + 1 for each in hit.hits])),
    "core 4 0: truncation: after truncate: group 1 keeps [], not [6], of 12 tokens": altering(
        "truncate", lambda rows: [row[:-1] for row in rows]
    ),
    "core 2 0: the keys of r5 leave out its cache salt, so that they are those of other prefixes too": deaf(salt=None),
    "core 2 3: the keys of r15 leave out its adapter, so that they are those of other prefixes too": deaf(lora=None),
    "core 2 3: the keys of r15 leave out its adapter's path, so that they are those of other prefixes too": deaf(
        lora=["a", ""]
    ),
    "core 2 3: the keys of r9 leave out its multimodal items, so that they are those of other prefixes too": deaf(
        multimodal=[]
    ),
    "core 2 0: the keys of r5 leave out its prompt embeddings, so that they are those of other prefixes too": deaf(
        embeds=None
    ),
}
"""Feature, version and seed of traffic, the first line about it, and the engine with which it shows that."""


@pytest.mark.parametrize("line", HEADLINES)
def test_first_lines_are_whole_and_the_same_in_either_order(line: str) -> None:
    (where, _, headline), engine = line.partition(": "), HEADLINES[line]
    feature, version, seed = where.split()
    for order in ((engine, "numpy"), ("numpy", engine)):
        comparison = Comparison(order, ALL, int(version), steps=8)
        assert comparison.engines == (engine.__name__, "numpy")
        assert comparison.seed(feature, int(seed))
        (found,) = comparison.differences(shrink=True, hurried=True)
        assert found.headline == headline
        assert len(found.case.operations) <= 12

"""Short ways to make a manager and to run requests through it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.log.structs import AllocateOp
from hkv.model.topology import Topology
from hkv.spec import LayerSpec, spec_from_text
from reference.dialects.vllm.manager import Manager

PLAIN: Any = {"lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}
"""Fields of an allocation with nothing special."""


def allocation(id: str, new: int, hit: int = 0, **changes: Any) -> AllocateOp:
    """An allocation with nothing special but for what is given."""
    return AllocateOp(id=id, new=new, hit=hit, **{**PLAIN, **changes})


def config(
    groups: str | Sequence[LayerSpec], num_blocks: int = 20, eagle: Sequence[int] = (), **fields: Any
) -> VllmConfig:
    """A configuration of `kind:block[:parameter]` groups; scheduler and hash blocks are lcm and gcd unless given."""
    specs = [spec_from_text(text) for text in groups.split(",")] if isinstance(groups, str) else list(groups)
    sizes = [spec.block_size for spec in specs]
    fields.setdefault("hash_block_size", math.gcd(*sizes))
    fields.setdefault("scheduler_block_size", math.lcm(*sizes))
    if eagle:
        fields["eagle"] = True
    return VllmConfig(topology=Topology.of_specs(specs, eagle), num_blocks=num_blocks, **fields)


def manager(
    groups: str | Sequence[LayerSpec], num_blocks: int = 20, eagle: Sequence[int] = (), **fields: Any
) -> Manager:
    """A manager of that configuration."""
    return Manager(config(groups, num_blocks, eagle, **fields))


def admit(cache: Manager, id: str, tokens: Sequence[int], **options: Any) -> list[list[int]] | None:
    """A request arrives and, if it fits, is computed to the end of its prompt, with whatever hit it has."""
    cache.request(id, tokens)
    hit = cache.lookup(id).hit
    blocks = cache.allocate(id, len(tokens) - hit, hit=hit, **options)
    if blocks is not None:
        cache.advance(id, len(tokens))
    return blocks


def finish(cache: Manager, id: str) -> None:
    """A request frees its blocks and is forgotten."""
    cache.free(id)
    cache.drop(id)


def cached(cache: Manager) -> dict[int, tuple[int, int]]:
    """Group and tokens covered of each block that has a key."""
    pool = cache.pool
    return {block: (key[0], pool.covered[block]) for block, key in enumerate(pool.primary) if key is not None}


def picture(cache: Manager) -> bytes:
    """Everything but the pending lookup, comparable."""
    return pickle.dumps(
        (
            list(cache.pool.free),
            cache.pool.refs,
            cache.pool.primary,
            cache.pool.events,
            {
                id: (cache.rows(id), vars(request).get("num_computed"), request.running)
                for id, request in cache.requests.items()
            },
        )
    )

"""Random configurations under RTP-LLM's rules, as objects, and random operations, from what the reference holds."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.bugs import FORGETS_ALIGNMENT, LEAKS_STATES
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.model.group_policy import CpMapping, EvictPolicy, GroupPolicy, GroupType
from hkv.model.topology import Group, Topology
from reference.dialects.rtp_llm.records import current
from tests.rtp_llm.build import FULL, LINEAR, SWA, group


def draw_config(rng: random.Random, *, roomy: bool = False) -> RtpConfig:
    """One, two or three groups over one pool or several; `roomy` for large pools, one rank, and no tail checked."""
    shape = rng.choice(["single", "hybrid", "pools", "pools"])
    size, ranks = rng.choice([1, 2, 4]), 1 if roomy else rng.choice([1, 1, 1, 2])
    types = [FULL] if shape == "single" else [FULL, *rng.choices([LINEAR, SWA, FULL], k=rng.randint(1, 2))]
    rng.shuffle(types)
    if shape == "single":
        ranks = 1
    groups = tuple(_group(rng, f"g{i}", kind, size, ranks) for i, kind in enumerate(types))
    topology = Topology(groups, pools="independent" if shape == "pools" else "shared")
    if roomy:
        relaxed = (dataclasses.replace(each, policy=_relaxed(each.policy)) for each in groups)
        topology = Topology(tuple(relaxed), pools=topology.pools)
    counts = tuple(400 if roomy else rng.randint(4, 24) for _ in range(topology.num_pools))
    return RtpConfig(
        topology=topology,
        num_blocks=counts,
        block_size=size,
        linear_step=rng.randint(0, 3),
        reserve_blocks=0 if roomy else rng.choice([0, 0, 1, 3]),
        prefix_tree=rng.random() < 0.5,
        independent_eviction=rng.random() < 0.5,
        cp_size=ranks,
        cp_rank=rng.randrange(ranks),
        bugs=frozenset(name for name in (LEAKS_STATES, FORGETS_ALIGNMENT) if rng.random() < 0.2),
    )


def _relaxed(policy: GroupPolicy) -> GroupPolicy:
    return dataclasses.replace(policy, validate_tail_blocks=False)


def _group(rng: random.Random, tag: str, kind: GroupType, size: int, ranks: int) -> Group:
    policy: dict[str, Any] = {"evict_policy": rng.choice(list(EvictPolicy))}
    if kind is not FULL:
        policy["active_tail_blocks"] = rng.randint(0, 3)
    if kind is SWA:
        policy["enable_prefix_reuse"] = rng.random() < 0.7
        policy["validate_tail_blocks"] = rng.random() < 0.3
        if rng.random() < 0.5:
            policy["cp_mapping"] = CpMapping.NONE
    compact = kind is SWA and "cp_mapping" not in policy
    return group(tag, kind, size * (ranks if compact else 1), **policy)


VOCABULARY = (1, 1, 1, 2)
"""Few tokens, so that texts begin alike."""


def draw_operation(rng: random.Random, number: int, engine: RtpNumpyEngine) -> structs.RtpOp:
    """One operation on a cache of few requests; now and then one that the engine must refuse."""
    requests = engine.requests
    if len(requests) < 2 or (len(requests) < 6 and rng.random() < 0.15):
        return _arrival(rng, f"r{number}")
    id = rng.choice(sorted(requests))
    request = engine.request(id)
    width = request.batch
    running = current(engine.cache, request) > 0
    if not running and request.rows[0].count and rng.random() < 0.3:
        return structs.DropOp(id=id)
    if not running and rng.random() < 0.6:
        flags = {"reuse": rng.random() < 0.8, "device_cache": rng.random() < 0.9}
        return structs.MallocOp(id=id, length=_length(rng, request.tokens), **flags)
    if running and rng.random() < 0.3:
        return structs.AppendOp(id=id, tokens=[_tokens(rng, count) for count in [rng.randint(1, 3)] * width])
    choices: list[Any] = [
        *[structs.MallocOp(id=id, reuse=rng.random() < 0.8, length=_length(rng, request.tokens))] * 4,
        *[structs.InsertOp(id=id, resident=rng.random() < 0.05)] * 5,
        *[structs.FreeOp(id=id), structs.DropOp(id=id)] * 2,
        *[_fork(rng, id, width)] * 2,
        structs.HoldOp(name=f"h{number}", id=id, sequence=rng.randrange(width), connector=rng.random() < 0.7),
        structs.ExportOp(name=f"e{number}", least=rng.randint(0, 4)),
        structs.EvictOp(least=rng.randint(0, 3)),
        structs.PeakOp(id=id, remaining=rng.randint(0, 9), reuse=rng.random() < 0.5, sequences=rng.randint(0, 4)),
        *[structs.ReleaseOp(name=name) for name in engine._held],
        *[structs.SettleOp(name=name) for name in engine._exported],
    ]
    if rng.random() < 0.05:
        choices = [
            structs.AppendOp(id=id, tokens=[[1]] * (width + 1)),
            structs.MallocOp(id=id, length=0),
            structs.ForkOp(id=id, sources=[width]),
            structs.HoldOp(name=f"h{number}", id=id, sequence=width),
            structs.FreeOp(id="nobody"),
            structs.RequestOp(id=id, tokens=[1]),
            structs.ReleaseOp(name="nothing"),
        ]
    return rng.choice(choices)


def _length(rng: random.Random, tokens: int) -> int | None:
    """Now and then slots for other than all tokens."""
    return None if rng.random() < 0.9 else max(1, tokens + rng.randint(-6, 6))


def _arrival(rng: random.Random, id: str) -> structs.RequestOp:
    tokens = _tokens(rng, rng.choice([*range(1, 13), 20]))
    return structs.RequestOp(
        id=id, tokens=tokens, sequences=rng.choice([1, 1, 1, 2, 3]), reserve=rng.choice([0, 0, 0, 1, 3])
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    tokens = [1] * count
    if rng.random() < 0.5:
        tokens[rng.randrange(count)] = rng.choice(VOCABULARY)
    return tokens


def _fork(rng: random.Random, id: str, width: int) -> structs.ForkOp:
    sources = [rng.randrange(width) for _ in range(rng.randint(0, min(4, width + 1)))]
    return structs.ForkOp(id=id, sources=sources, copy_last=rng.random() < 0.8)

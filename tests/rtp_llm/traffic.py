"""Random configurations under RTP-LLM's rules, as objects."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.model.group_policy import CpMapping, EvictPolicy, GroupPolicy, GroupType
from hkv.model.topology import Group, Topology
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
    )


def _relaxed(policy: GroupPolicy) -> GroupPolicy:
    return dataclasses.replace(policy, validate_tail_blocks=False)


def _group(rng: random.Random, tag: str, kind: GroupType, size: int, ranks: int) -> Group:
    policy: dict[str, Any] = {"evict_policy": rng.choice(list(EvictPolicy)[:2])}
    if kind is not FULL:
        policy["active_tail_blocks"] = rng.randint(0, 3)
    if kind is SWA:
        policy["enable_prefix_reuse"] = rng.random() < 0.7
        policy["validate_tail_blocks"] = rng.random() < 0.3
        if rng.random() < 0.5:
            policy["cp_mapping"] = CpMapping.NONE
    compact = kind is SWA and "cp_mapping" not in policy
    return group(tag, kind, size * (ranks if compact else 1), **policy)

"""Short ways to make configurations, allocators and requests under RTP-LLM's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hkv.dialects.rtp_llm.config import NULL, RtpConfig
from hkv.dialects.rtp_llm.planning.descriptions import dsv4_descriptions, dsv4_layer_tags
from hkv.model.group_policy import CpMapping, GroupType, default_policy
from hkv.model.topology import Group, Topology
from hkv.spec import FullAttention, Mamba
from tests.rtp_llm.witness.allocator import Allocator
from tests.rtp_llm.witness.kinds.full import FullKind
from tests.rtp_llm.witness.kinds.linear import LinearKind
from tests.rtp_llm.witness.kinds.swa import SwaKind
from tests.rtp_llm.witness.manager import ALLOCATORS
from tests.rtp_llm.witness.operation import MallocInfo, Tokens
from tests.rtp_llm.witness.pool import BlockPool
from tests.rtp_llm.witness.resource import BatchResource
from tests.rtp_llm.witness.shared_cache import SharedBlockCache

FULL, LINEAR, SWA = GroupType.FULL, GroupType.LINEAR, GroupType.SWA
KINDS = {FULL: FullKind, LINEAR: LinearKind, SWA: SwaKind}


def group(tag: str, group_type: GroupType, block_size: int, kernel: int = 0, **policy: Any) -> Group:
    """A group of that type, with its default policy but for what is given."""
    spec = Mamba(block_size=block_size) if group_type is LINEAR else attention(block_size)
    chosen = dataclasses.replace(default_policy(group_type), **policy)
    return Group(tag=tag, spec=spec, policy=chosen, kernel_block_size=kernel)


def attention(block_size: int) -> FullAttention:
    return FullAttention(block_size=block_size, num_kv_heads=1, head_size=8, dtype="bfloat16")


def kind(
    group_type: GroupType, num_blocks: int = 10, block_size: int = 4, step: int = 2, tree: bool = False, **policy: Any
) -> Any:
    """One group alone over a pool of its own."""
    pool = BlockPool(num_blocks)
    chosen = dataclasses.replace(default_policy(group_type), **policy)
    return KINDS[group_type](0, chosen, block_size, step, pool, SharedBlockCache([pool], tree=tree))


def single(num_blocks: int = 10, block_size: int = 4, *, policy: dict[str, Any] | None = None, **fields: Any) -> Any:
    """One full group."""
    topology = Topology((group("default", FULL, block_size, **(policy or {})),))
    return allocator(topology, (num_blocks,), **fields)


def tiny_hybrid(num_blocks: int = 10, *, tail: int = 1, **fields: Any) -> Any:
    """A linear and a full group over one pool, blocks of 4 tokens, step 2."""
    groups = (group("linear", LINEAR, 4, active_tail_blocks=tail), group("full1", FULL, 4, kernel=2))
    return allocator(Topology(groups), (num_blocks,), **{"linear_step": 2, **fields})


def tiny_multi(linear: int, full: int, **fields: Any) -> Any:
    """A linear and a full group with a pool each, blocks of 4 tokens, step 2."""
    groups = (group("linear", LINEAR, 4), group("full1", FULL, 4))
    return allocator(Topology(groups, pools="independent"), (linear, full), **{"linear_step": 2, **fields})


def allocator(topology: Topology, num_blocks: tuple[int, ...], **fields: Any) -> Allocator:
    config = RtpConfig(topology=topology, num_blocks=num_blocks, **fields)
    return ALLOCATORS[config.name](config)


def dsv4_groups(ratios: Sequence[int], block_size: int, cp_size: int = 1) -> tuple[Group, ...]:
    """DeepSeek-V4's groups in the order in which layers name them; only ids are studied, so all cache keys alike."""
    found = []
    described = dsv4_descriptions(head_dim=512, indexer_dim=128, float8=False)
    for tag in dict.fromkeys(tag for ratio in ratios for tag in dsv4_layer_tags(ratio)):
        policy = described[tag].policy
        compact = policy.cp_mapping is CpMapping.COMPACT_LAST_RANK
        found.append(Group(tag=tag, spec=attention(block_size * (cp_size if compact else 1)), policy=policy))
    return tuple(found)


FLASH = (0, 0, 4, 128, 4)


def dsv4_allocator(ratios: Sequence[int] = FLASH, num_blocks: int = 100, block_size: int = 4, **fields: Any) -> Any:
    """DeepSeek-V4 with a pool a group."""
    groups = dsv4_groups(ratios, block_size, fields.get("cp_size", 1))
    counts = tuple(each.policy.explicit_block_num or num_blocks for each in groups)
    return allocator(Topology(groups, pools="independent"), counts, block_size=block_size, **fields)


def resource(of: Allocator, batch: int = 1, keys: Sequence[int] = ()) -> BatchResource:
    made = BatchResource(of.config, batch)
    for row in made.rows:
        row.set_keys(keys)
    return made


def info(
    of: Allocator,
    seq: int,
    *,
    batch: int = 1,
    keys: Sequence[int] = (),
    reserve: int = 0,
    held: BatchResource | None = None,
    **flags: Any,
) -> MallocInfo:
    """An allocation of `seq` tokens for a new request, or for `held`."""
    held = resource(of, batch, keys) if held is None else held
    return MallocInfo(held, Tokens(seq, batch, of.config.block_size, reserve), **flags)


def granted(of: Allocator, seq: int, **options: Any) -> MallocInfo:
    """The same, which the allocator has granted."""
    asked = info(of, seq, **options)
    assert of.malloc(asked).success
    return asked


def grown(before: MallocInfo, seq: int, **flags: Any) -> MallocInfo:
    """The same request, longer."""
    before.tokens.set_length(seq)
    return dataclasses.replace(before, **flags)


def lists(held: BatchResource, row: int = 0) -> list[list[int]]:
    return [list(blocks.blocks) for blocks in held.rows[row].groups]


def shape(blocks: Sequence[int]) -> str:
    """`x` for a block, `.` for a hole."""
    return "".join("." if block == NULL else "x" for block in blocks)


def cache_blocks(of: Allocator, entries: dict[int, Sequence[int]], **options: Any) -> dict[int, dict[int, int]]:
    """Cache fresh blocks: group to keys. Answers group to key to block; no request holds them."""
    placed: dict[int, dict[int, int]] = {}
    for index, keys in entries.items():
        for key in keys:
            (block,) = of.kinds[index].pool.malloc(1)
            of.cache.put(key, of.entry({index: block}), **options)
            of.kinds[index].pool.release([block])
            placed.setdefault(index, {})[key] = block
    return placed


def counters(of: Allocator) -> list[tuple[int, ...]]:
    """Everything a refused operation must leave as it was."""
    return [(tuple(pool.unheld), *(tuple(pool.refs.counts[role]) for role in pool.refs.counts)) for pool in of.pools]

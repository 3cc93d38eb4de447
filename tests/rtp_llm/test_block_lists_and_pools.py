"""RTP-LLM's conformance vectors for block lists and pools."""

from __future__ import annotations

import pytest

from hkv.dialects.rtp_llm.planning.pools import kernel_blocks
from hkv.errors import OperationError, TopologyError
from hkv.model.group_policy import GroupType
from hkv.model.topology import Group, Topology
from hkv.spec import MLAAttention
from reference.dialects.rtp_llm.block_ids import BlockIds
from reference.dialects.rtp_llm.pool import BlockPool
from reference.dialects.rtp_llm.resource import Resource
from tests.rtp_llm.build import attention, group

N = -1


def test_growing_fills_with_a_value_and_resyncs() -> None:
    ids = BlockIds([N, 3], ratio=2)
    ids.resize(3, 2)
    assert (ids.blocks, ids.kernel) == ([N, 3, 2], [N, N, 6, 7, 4, 5])


def test_popping_drops_the_kernel_blocks_too() -> None:
    ids = BlockIds([N, 2, 3], ratio=2)
    assert ids.pop() == 3
    assert (ids.blocks, ids.kernel) == ([N, 2], [N, N, 4, 5])


def test_a_full_groups_blocks_split() -> None:
    resource = Resource(Topology((group("full", GroupType.FULL, 8, kernel=2),)))
    resource.groups[0].add([1, 2])
    assert resource.groups[0].kernel == list(range(4, 12))


def test_a_layer_of_two_groups_has_no_one_list() -> None:
    groups = tuple(Group(tag=tag, spec=attention(4), layers=("layer",)) for tag in ("a", "b"))
    with pytest.raises(TopologyError):
        Resource(Topology(groups, pools="independent")).layer_blocks()


def test_keys_of_this_rank() -> None:
    from hkv.dialects.rtp_llm.config import CpSlotMapper

    keys = [100, 101, 200, 201, 300, 301, 400, 401]
    assert CpSlotMapper(1, 2, 4).local_keys(keys) == [101, 201, 301, 401]


def test_kernel_blocks_in_a_block() -> None:
    assert (kernel_blocks(8, 2), kernel_blocks(1, 0)) == (4, 1)


def test_kernel_blocks_of_a_latent_group() -> None:
    spec = MLAAttention(block_size=512, num_kv_heads=1, head_size=576, dtype="bfloat16")
    latent = Group(tag="default", spec=spec, kernel_block_size=64)
    assert (latent.kernel_block_size, latent.kernel_blocks_per_block) == (64, 8)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(10)
    assert pool.malloc(5) == [1, 2, 3, 4, 5]
    assert pool.malloc(10) == []
    assert pool.free == 4


def test_released_blocks_are_free() -> None:
    pool = BlockPool(10)
    pool.release(pool.malloc(5)[:3])
    assert pool.free == 7


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(10)
    seen = []
    blocks = pool.malloc(3)
    seen.append((pool.free, pool.available))
    pool.reference(blocks)
    seen.append((pool.free, pool.available))
    for _ in range(2):
        pool.release(blocks)
        seen.append((pool.free, pool.available))
    assert seen == [(6, 6), (6, 6), (6, 6), (9, 9)]


@pytest.mark.parametrize("block", [0, 1, 10])
def test_what_nobody_holds_cannot_be_released(block: int) -> None:
    with pytest.raises(OperationError):
        BlockPool(10).release([block])


def test_three_roles_and_three_counts() -> None:
    pool = BlockPool(6)
    held, copied, cached, both = ([block] for block in pool.malloc(4))
    pool.reference(copied, "connector")
    pool.reference(cached, "cache")
    pool.reference(both, "cache")
    pool.release([*copied, *cached])
    assert (pool.total, pool.free, pool.available, pool.not_in_use) == (5, 1, 2, 2)
    assert [pool.busy(role) for role in ("request", "connector", "cache")] == [2, 1, 2]
    assert held == [1]

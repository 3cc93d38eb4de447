"""The eleven fields of a group's policy, their defaults and what they refuse."""

import dataclasses
import pathlib

import pytest

from hkv.errors import TopologyError
from hkv.model.group_policy import (
    CacheDescription,
    CpMapping,
    CpSlice,
    EvictPolicy,
    GroupPolicy,
    GroupType,
    MemoryPlacement,
    default_policy,
    group_type_of,
)
from hkv.spec import ChunkedLocal, FullAttention, Mamba, MLAAttention, OpaqueState, SlidingWindow


def test_numbers_are_rtp_llms():
    assert [(m.name, m.value) for m in GroupType] == [("LINEAR", 0), ("FULL", 1), ("SWA", 2)]
    assert [(m.name, m.value) for m in EvictPolicy] == [("CHAIN", 0), ("INDEPENDENT", 1), ("NONE", 2)]
    assert [(m.name, m.value) for m in MemoryPlacement] == [("DEVICE", 0), ("HOST", 1), ("HOST_PINNED", 2)]
    assert [(m.name, m.value) for m in CpMapping] == [("NONE", 0), ("BLOCK_ROUND_ROBIN", 1), ("COMPACT_LAST_RANK", 2)]
    assert [(m.name, m.value) for m in CpSlice] == [("NONE", 0), ("EQUAL_BYTES", 1), ("PAYLOAD_BYTES", 2)]


@pytest.mark.parametrize(
    ("group_type", "reuse", "tail", "mapping"),
    [
        (GroupType.FULL, True, 0, CpMapping.BLOCK_ROUND_ROBIN),
        (GroupType.LINEAR, True, 1, CpMapping.NONE),
        (GroupType.SWA, False, 2, CpMapping.COMPACT_LAST_RANK),
    ],
)
def test_defaults_per_type(group_type, reuse, tail, mapping):
    policy = default_policy(group_type)
    assert policy == GroupPolicy(
        group_type=group_type, enable_prefix_reuse=reuse, active_tail_blocks=tail, cp_mapping=mapping
    )


@pytest.mark.parametrize(
    ("spec", "group_type"),
    [
        (FullAttention(block_size=16), GroupType.FULL),
        (MLAAttention(block_size=16), GroupType.FULL),
        (SlidingWindow(block_size=16, window=1), GroupType.SWA),
        (SlidingWindow(block_size=16, window=4096), GroupType.SWA),
        (ChunkedLocal(block_size=16, chunk=8192), GroupType.SWA),
        (OpaqueState(block_size=16), GroupType.SWA),
        (Mamba(block_size=16), GroupType.LINEAR),
    ],
)
def test_type_follows_from_what_a_query_reads(spec, group_type):
    assert group_type_of(spec) is group_type


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"group_type": 1}, "GroupType: LINEAR, FULL, SWA"),
        ({"evict_policy": "chain"}, "EvictPolicy: CHAIN, INDEPENDENT, NONE"),
        ({"enable_prefix_reuse": 1}, "enable_prefix_reuse = 1"),
        ({"explicit_block_num": -1}, "explicit_block_num = -1"),
        ({"explicit_block_num": True}, "explicit_block_num = True"),
        ({"active_tail_blocks": 1.0}, "active_tail_blocks = 1.0"),
        ({"memory_placement": MemoryPlacement.HOST, "charge_to_paged_budget": True}, "a pool in host memory"),
    ],
)
def test_refused(fields, words):
    with pytest.raises(TopologyError) as error:
        GroupPolicy(**fields)
    assert words in str(error.value)


FULL = FullAttention(block_size=8, num_kv_heads=2, head_size=4)
STATE = Mamba(block_size=8, shapes=((4,),))


def test_policy_is_default_then_state_cache_then_overrides():
    description = CacheDescription(tag="s", spec=OpaqueState(block_size=8), state_cache=True)
    assert description.policy == dataclasses.replace(
        default_policy(GroupType.SWA), enable_prefix_reuse=True, evict_policy=EvictPolicy.INDEPENDENT
    )
    overrides = {
        "enable_prefix_reuse": False,
        "evict_policy": EvictPolicy.NONE,
        "reservable": False,
        "explicit_block_num": 256,
        "charge_to_paged_budget": True,
        "memory_placement": MemoryPlacement.HOST_PINNED,
        "active_tail_blocks": 1,
        "validate_tail_blocks": False,
        "cp_mapping": CpMapping.NONE,
        "cp_slice": CpSlice.PAYLOAD_BYTES,
    }
    full = dataclasses.replace(description, group_type=GroupType.FULL, **overrides)
    assert full.policy == GroupPolicy(group_type=GroupType.FULL, **overrides)
    for name, value in overrides.items():
        changed = dataclasses.replace(description, **{name: value}).policy
        assert changed == dataclasses.replace(description.policy, **{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"tag": "", "spec": FULL},
        {"tag": "a", "spec": None},
        {"tag": "a", "spec": FULL, "group_type": "FULL"},
        {"tag": "a", "spec": STATE, "group_type": GroupType.FULL},
        {"tag": "a", "spec": FULL, "active_tail_blocks": -1},
        {"tag": "a", "spec": FULL, "memory_placement": MemoryPlacement.HOST, "charge_to_paged_budget": True},
    ],
)
def test_a_description_is_checked_at_once(fields):
    with pytest.raises(TopologyError):
        CacheDescription(**fields)


def test_the_documented_example(capsys):
    page = pathlib.Path(__file__).parents[2] / "docs" / "topology.md"
    exec(page.read_text().split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out == "('full', 'linear') 2\n"

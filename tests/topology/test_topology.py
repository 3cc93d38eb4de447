"""Groups, layers, pools: what is accepted, what is refused and with which words, and what can be asked."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from hkv.model.topology import Group, Layer, Topology
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, Mamba, MLAAttention, OpaqueState, SlidingWindow

FULL = FullAttention(block_size=16)
WINDOW = SlidingWindow(block_size=16, window=64)
STATE = Mamba(block_size=32)


def group(tag, *layers, spec: LayerSpec = FULL, **fields):
    return Group(tag=tag, spec=spec, layers=layers, **fields)


REFUSED_GROUPS = {
    "empty tag": ({"tag": "", "spec": FULL}, "tag = ''"),
    "tag is no text": ({"tag": 3, "spec": FULL}, "tag = 3"),
    "no spec": ({"tag": "a", "spec": "full"}, "spec = 'full'"),
    "layer twice": ({"tag": "a", "spec": FULL, "layers": ("x", "x")}, "each layer once"),
    "kernel block does not divide": ({"tag": "a", "spec": FULL, "kernel_block_size": 5}, "kernel_block_size = 5"),
    "kernel block too long": (
        {"tag": "a", "spec": FULL, "kernel_block_size": 32},
        "a divisor of the block's 16 tokens",
    ),
    "kernel block negative": ({"tag": "a", "spec": FULL, "kernel_block_size": -4}, "kernel_block_size = -4"),
    "kernel block a float": ({"tag": "a", "spec": FULL, "kernel_block_size": 4.0}, "kernel_block_size = 4.0"),
    "snapshot in a FULL group": (
        {"tag": "a", "spec": STATE, "policy": default_policy(GroupType.FULL)},
        "LINEAR, as mamba keeps snapshots",
    ),
    "snapshot in a SWA group": (
        {"tag": "a", "spec": STATE, "policy": default_policy(GroupType.SWA)},
        "group_type = 'SWA'",
    ),
    "policy is no policy": ({"tag": "a", "spec": FULL, "policy": "full"}, "policy = 'full'"),
}


PAIR = (group("a", "x"), group("b", "y"))
X, Y = Layer(name="x", tags=("a",)), Layer(name="y", tags=("b",))


def listing(*layers, pools="shared"):
    return {"layers": layers, "pools": pools}


REFUSED_TOPOLOGIES = {
    "no groups": ((), {}, "at least one group"),
    "no layers": (PAIR, listing(), "at least one layer"),
    "tag twice": ((group("a", "x"), group("a", "y")), {}, "groups = 'a'"),
    "unknown kind of pools": (PAIR, {"pools": "many"}, "pools = 'many'"),
    "layer in two groups of a shared pool": ((group("a", "x"), group("b", "x")), {}, "layers = 'x'"),
    "layer named twice": (PAIR, listing(X, X, Y), "a name that no other layer has"),
    "layer of a group is unknown": (PAIR, listing(X), "layers of group b = 'y'"),
    "group of a layer is unknown": (
        PAIR,
        listing(Layer(name="x", tags=("a", "c")), Y, pools="independent"),
        "tags of layer x = 'c'",
    ),
    "layer lists a group that does not list it": (
        PAIR,
        listing(Layer(name="x", tags=("a", "b")), Y, pools="independent"),
        "layers of group b = ('y',)",
    ),
    "group lists a layer that does not list it": (
        (group("a", "x", "y"), group("b", "y")),
        listing(X, Y, pools="independent"),
        "tags of layer y = ('b',)",
    ),
    "sharing with a later layer": (PAIR, listing(Layer(name="z", cache_of="x"), X, Y), "cache_of of layer z = 'x'"),
    "sharing with a layer that shares": (
        PAIR,
        listing(X, Y, Layer(name="v", cache_of="x"), Layer(name="w", cache_of="v")),
        "a layer before w with a cache of its own",
    ),
    "sharing with itself": (PAIR, listing(X, Y, Layer(name="w", cache_of="w")), "cache_of of layer w = 'w'"),
}


REFUSED_LAYERS = {
    "no name": ({"name": ""}, "layer = ''"),
    "no group": ({"name": "x"}, "at least one group"),
    "group twice": ({"name": "x", "tags": ("a", "a")}, "each group once"),
    "groups of a layer that shares": ({"name": "x", "tags": ("a",), "cache_of": "y"}, "none, as it reads y's cache"),
}
REFUSED = {
    **{f"group, {name}": (Group, fields, words) for name, (fields, words) in REFUSED_GROUPS.items()},
    **{f"layer, {name}": (Layer, fields, words) for name, (fields, words) in REFUSED_LAYERS.items()},
    **{name: (Topology, {"groups": made, **rest}, words) for name, (made, rest, words) in REFUSED_TOPOLOGIES.items()},
}


@pytest.mark.parametrize(("make", "fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_said(make, fields, words):
    with pytest.raises(TopologyError) as error:
        make(**fields)
    assert words in str(error.value)


def test_only_full_groups_have_kernel_blocks():
    assert group("a", kernel_block_size=4).kernel_blocks_per_block == 4
    assert group("a", kernel_block_size=4, policy=default_policy(GroupType.SWA)).kernel_blocks_per_block == 1
    assert group("a", spec=STATE, kernel_block_size=4).kernel_blocks_per_block == 1


def test_anonymous_groups_have_no_layers():
    topology = Topology.of_specs([FULL, WINDOW], eagle_groups=[1])
    assert topology.tags == ("g0", "g1")
    assert topology.layers == ()
    assert topology.eagle_groups == (1,)
    assert topology.specs == (FULL, WINDOW)
    with pytest.raises(TopologyError, match="eagle_groups"):
        Topology.of_specs([FULL], eagle_groups=[1])


def test_pools():
    shared = Topology(PAIR)
    independent = Topology(PAIR, pools="independent")
    assert (shared.num_pools, shared.pool_of("b")) == (1, 0)
    assert (independent.num_pools, independent.pool_of("b")) == (2, 1)
    for topology in (shared, independent):
        with pytest.raises(TopologyError, match="tag = 'c'"):
            topology.pool_of("c")


def test_a_layer_in_several_groups():
    topology = Topology((group("a", "x", "y"), group("b", "y")), pools="independent")
    assert [g.tag for g in topology.groups_of("y")] == ["a", "b"]
    assert topology.group_of("y", "b").tag == "b"
    assert topology.group_of("x").tag == "a"
    with pytest.raises(TopologyError, match="one of layer y's: a, b"):
        topology.group_of("y")
    with pytest.raises(TopologyError, match="tag = 'b'"):
        topology.group_of("x", "b")
    with pytest.raises(TopologyError, match="layer = 'z'"):
        topology.group_of("z")


def test_the_layers_own_order_of_groups_counts():
    layers = (Layer(name="x", tags=("b", "a")),)
    topology = Topology((group("a", "x"), group("b", "x")), layers=layers, pools="independent")
    assert [g.tag for g in topology.groups_of("x")] == ["b", "a"]


def test_every_name_resolves_to_an_owner():
    topology = Topology(PAIR, layers=(X, Y, Layer(name="z", cache_of="y")))
    assert [topology.owner(layer.name) for layer in topology.layers] == ["x", "y", "y"]
    assert topology.group_of("z").tag == "b"
    assert all("z" not in g.layers for g in topology.groups)


@st.composite
def memberships(draw):
    """Layers that each group lists, every layer at least once."""
    groups, layers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    table = [[draw(st.booleans()) for _ in range(layers)] for _ in range(groups)]
    for layer in range(layers):
        table[draw(st.integers(0, groups - 1))][layer] = True
    return table


def _topology(table, pools="independent"):
    groups = tuple(group(f"g{i}", *(f"l{j}" for j, member in enumerate(row) if member)) for i, row in enumerate(table))
    layers = tuple(
        Layer(name=f"l{j}", tags=tuple(f"g{i}" for i, row in enumerate(table) if row[j])) for j in range(len(table[0]))
    )
    return Topology(groups, layers=layers, pools=pools)


@given(memberships(), st.data())
@settings(max_examples=200)
def test_groups_and_layers_agree_or_are_refused(table, data):
    topology = _topology(table)
    for i, row in enumerate(table):
        for j, member in enumerate(row):
            assert (f"l{j}" in topology.group(f"g{i}").layers) == member
            assert (topology.group(f"g{i}") in topology.groups_of(f"l{j}")) == member
    i, j = data.draw(st.integers(0, len(table) - 1)), data.draw(st.integers(0, len(table[0]) - 1))
    flipped = [row.copy() for row in table]
    flipped[i][j] = not flipped[i][j]
    groups = tuple(
        dataclasses.replace(g, layers=tuple(f"l{b}" for b, member in enumerate(row) if member))
        for g, row in zip(topology.groups, flipped, strict=True)
    )
    with pytest.raises(TopologyError):
        Topology(groups, layers=topology.layers, pools="independent")


@given(memberships())
@settings(max_examples=100)
def test_a_shared_pool_takes_one_group_a_layer(table):
    if all(sum(column) == 1 for column in zip(*table, strict=True)):
        assert all(len(layer.tags) == 1 for layer in _topology(table, "shared").layers)
    else:
        with pytest.raises(TopologyError, match="one group only in a shared pool"):
            _topology(table, "shared")


def test_descriptions_need_neither_jax_nor_numpy():
    code = "import sys, hkv.model.topology; print({'jax', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# The eleven fields of a group's policy, their defaults and what they refuse.


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

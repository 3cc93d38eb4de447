"""Topologies made from what a model says of each layer; the vectors are RTP-LLM's own."""

import dataclasses
import pathlib

import pytest

from hkv.errors import TopologyError
from hkv.model.group_policy import (
    CpMapping,
    CpSlice,
    EvictPolicy,
    GroupPolicy,
    GroupType,
    MemoryPlacement,
    default_policy,
)
from hkv.model.layer_description import CacheDescription, LayerDescription, describe_topology
from hkv.spec import FullAttention, Mamba, MLAAttention, OpaqueState, SlidingWindow

FULL = FullAttention(block_size=8, num_kv_heads=2, head_size=4)
STATE = Mamba(block_size=8, shapes=((4,),))


def one(tag, spec=FULL, **fields):
    return LayerDescription(caches=(CacheDescription(tag=tag, spec=spec, **fields),))


def test_h21_groups_of_a_hybrid_model():
    kinds = {"l0": STATE, "l1": STATE, "l2": STATE, "f": FULL}
    topology = describe_topology([one(tag, kinds[tag]) for tag in ("l0", "l0", "l1", "f", "l1", "l2", "l2", "f")])
    places = {group.tag: [int(name.split(".")[1]) for name in group.layers] for group in topology.groups}
    assert places == {"f": [3, 7], "l0": [0, 1], "l1": [2, 4], "l2": [5, 6]}
    assert topology.tags[0] == "f"


def _deepseek_v4(ratios):
    """The caches of each layer by its compression ratio, as RTP-LLM's DeepSeek V4 describes them."""

    def kv(tag):
        return CacheDescription(tag=tag, spec=MLAAttention(block_size=256))

    def state(tag):
        return CacheDescription(tag=tag, spec=OpaqueState(block_size=256), state_cache=True)

    tails = {
        4: (kv("csa_kv"), kv("indexer_kv"), state("indexer_state"), state("csa_state")),
        128: (kv("hca_kv"), state("hca_state")),
    }
    layers = [LayerDescription(caches=(*tails.get(ratio, ()), state("swa_kv"))) for ratio in ratios]
    return describe_topology(layers, pools="independent")


@pytest.mark.parametrize(
    ("ratios", "tags", "hca", "csa"),
    [
        (
            [128, 128] + [4, 128] * 29 + [4],
            "hca_kv hca_state swa_kv csa_kv indexer_kv indexer_state csa_state",
            31,
            30,
        ),
        ([0, 0] + [4, 128] * 20 + [4], "swa_kv csa_kv indexer_kv indexer_state csa_state hca_kv hca_state", 20, 21),
    ],
    ids=["pro", "flash"],
)
def test_k15_group_order_of_deepseek_v4(ratios, tags, hca, csa):
    topology = _deepseek_v4(ratios)
    assert topology.tags == tuple(tags.split())
    assert len(topology.group("hca_kv").layers) == hca
    assert len(topology.group("csa_kv").layers) == csa
    assert len(topology.group("swa_kv").layers) == len(ratios)
    assert not topology.one_group_per_layer
    assert topology.num_pools == 7


def test_a10_layer_owning_two_groups_has_no_sole_one():
    with pytest.raises(TopologyError, match="tag = None"):
        _deepseek_v4([128]).group_of("layers.0")


@pytest.mark.parametrize(
    ("block_size", "kernel", "expected"),
    [(8, 2, 4), (1, 0, 1), (8, 0, 1), (512, 64, 8), (8, 16, 1)],
    ids=["a16 seq 8 kernel 2", "a16 seq 1 kernel 0", "no size", "a17 mla 512 by 64", "smaller than the kernel's"],
)
def test_kernel_blocks_per_block(block_size, kernel, expected):
    spec = MLAAttention(block_size=block_size)
    topology = describe_topology([one("default", spec)], kernel_block_size=kernel)
    assert topology.groups[0].kernel_blocks_per_block == expected


def test_only_full_groups_are_split():
    topology = describe_topology([one("full"), one("linear", STATE)], kernel_block_size=2)
    assert [group.kernel_block_size for group in topology.groups] == [2, 8]


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


def test_a_later_layer_reads_an_earlier_ones_cache():
    window = SlidingWindow(block_size=8, window=16)
    layers = [one("full"), one("swa", window), LayerDescription(cache_of="layers.1", name="top")]
    topology = describe_topology(layers)
    assert topology.owner("top") == "layers.1"
    assert topology.group_of("top").tag == "swa"
    assert [group.layers for group in topology.groups] == [("layers.0",), ("layers.1",)]
    checked = dataclasses.replace(layers[2], caches=layers[1].caches)
    assert describe_topology([*layers[:2], checked]) == topology


def test_a_layer_shares_only_with_its_own_kind():
    window = one("swa", SlidingWindow(block_size=8, window=16))
    wrong = dataclasses.replace(window, cache_of="layers.0")
    with pytest.raises(TopologyError, match=r"caches of layer layers\.2"):
        describe_topology([one("full"), window, wrong])


REFUSED = {
    "no layers": ([], "shared", "at least one layer"),
    "layer without a cache": ([one("f"), LayerDescription()], "shared", "at least one group"),
    "two caches in a shared pool": (
        [LayerDescription(caches=(*one("a").caches, *one("b").caches))],
        "shared",
        "one cache a layer in a shared pool",
    ),
    "a tag twice in a layer": (
        [LayerDescription(caches=(*one("a").caches, *one("a").caches))],
        "independent",
        "each tag once",
    ),
    "one tag, two specs": ([one("f"), one("f", FullAttention(block_size=16))], "shared", "spec of layer layers.1"),
    "one tag, two policies": ([one("f"), one("f", active_tail_blocks=1)], "independent", "policy of layer layers.1"),
    "two full groups in a shared pool": ([one("f"), one("g")], "shared", "['f', 'g']"),
    "no full group in a shared pool": ([one("l", STATE)], "shared", "exactly one group of type FULL"),
    "linear groups of two sizes": (
        [one("f"), one("l", STATE), one("m", Mamba(block_size=8, shapes=((5,),)))],
        "shared",
        "states of one size",
    ),
    "a name twice": (
        [one("f"), dataclasses.replace(one("f"), name="layers.0")],
        "shared",
        "a name that no other layer has",
    ),
    "unknown owner": ([one("f"), LayerDescription(cache_of="q")], "shared", "cache_of of layer layers.1 = 'q'"),
}


@pytest.mark.parametrize(("layers", "pools", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(layers, pools, words):
    with pytest.raises(TopologyError) as error:
        describe_topology(layers, pools=pools)
    assert words in str(error.value)


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

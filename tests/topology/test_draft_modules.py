"""Draft modules in the target's groups; the vectors are RTP-LLM's own."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import TopologyError
from hkv.model.draft_modules import draft_layer_id, merge_draft_modules
from hkv.model.group_policy import GroupType, default_policy
from hkv.model.topology import Group, Layer, Topology
from hkv.spec import FullAttention, Mamba, MLAAttention

FULL = FullAttention(block_size=8, num_kv_heads=2, head_size=4)
STATE = Mamba(block_size=8, shapes=((4,),))


def groups(specs, **layers):
    """A topology with a group per keyword; each lists its layers by number."""
    made = tuple(Group(tag=tag, spec=specs[tag], layers=tuple(f"l{i}" for i in ids)) for tag, ids in layers.items())
    return Topology(made, pools="independent")


def ids(merged, topology):
    """Layer numbers of each group, as RTP-LLM lists them."""
    place = {layer.name: index for index, layer in enumerate(merged.layers)}
    return {group.tag: [place[name] for name in group.layers] for group in topology.groups}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((2, 0, 3, 0), 2), ((2, 0, 3, 2), 4), ((2, 1, 3, 0), 5), ((2, 1, 3, 2), 7)],
)
def test_k19_global_layer_ids(arguments, expected):
    assert draft_layer_id(*arguments) == expected


@pytest.mark.parametrize("arguments", [(2, -1, 3, 0), (2, 0, 0, 0), (2, 0, 3, 3), (2, 0, 3, -1), (-1, 0, 3, 0)])
def test_k19_bad_arguments_are_refused(arguments):
    with pytest.raises(TopologyError):
        draft_layer_id(*arguments)


HYBRID = groups({"full": FULL, "l0": STATE, "l1": STATE, "l2": STATE}, full=[3, 7], l0=[0, 1], l1=[2, 4], l2=[5, 6])


@pytest.mark.parametrize("tag", ["full", "default"], ids=["exact tag", "h23 default alias"])
def test_h23_draft_of_a_hybrid_model(tag):
    merged = merge_draft_modules(HYBRID, [groups({tag: FULL}, **{tag: [0]})] * 2)
    assert ids(HYBRID, HYBRID)["full"] == ids(merged.topology, merged.topology)["full"][:2]
    assert merged.topology.group("full").layers == ("l3", "l7", "draft0.l0", "draft1.l0")
    assert [merged.global_id(m, 0) for m in range(2)] == [8, 9]
    assert [merged.topology.layers[i].name for i in (8, 9)] == ["draft0.l0", "draft1.l0"]
    for module in merged.modules:
        assert module.tags == HYBRID.tags
        assert [group.layers for group in module.groups] == [("l0",), (), (), ()]


def test_h24_placeholder_groups():
    target = groups({"default": FULL, "aux": STATE}, default=[0], aux=[1])
    merged = merge_draft_modules(target, [groups({"default": FULL}, default=[0])])
    assert ids(merged.topology, merged.topology) == {"default": [0, 2], "aux": [1]}
    assert ids(merged.modules[0], merged.modules[0]) == {"default": [0], "aux": []}


DRAFT = groups({"default": FULL}, default=[0])
INCOMPATIBLE = {
    "linear target": STATE,
    "other block size": dataclasses.replace(FULL, block_size=16),
    "other heads": dataclasses.replace(FULL, num_kv_heads=1),
    "latent attention": MLAAttention(block_size=8, num_kv_heads=2, head_size=8),
    "other stride": dataclasses.replace(FULL, page_size_padded=4096),
    "other element type": dataclasses.replace(FULL, dtype="float16"),
}


@pytest.mark.parametrize("spec", INCOMPATIBLE.values(), ids=INCOMPATIBLE)
def test_h25_no_compatible_target_group(spec):
    with pytest.raises(TopologyError, match="a compatible target group"):
        merge_draft_modules(groups({"a": spec}, a=[0]), [DRAFT])


def test_h25_other_policy():
    policy = dataclasses.replace(default_policy(GroupType.FULL), active_tail_blocks=1)
    target = Topology((Group(tag="a", spec=FULL, layers=("l0",), policy=policy),))
    with pytest.raises(TopologyError, match="a compatible target group"):
        merge_draft_modules(target, [DRAFT])


def test_h25_ambiguous_default():
    target = groups({"a": FULL, "b": FULL}, a=[0], b=[1])
    with pytest.raises(TopologyError, match="not several: a, b"):
        merge_draft_modules(target, [DRAFT])


def test_an_alias_is_for_a_sole_default_group_of_attention():
    target = groups({"a": FULL, "s": STATE}, a=[0], s=[1])
    for draft in (
        groups({"default": FULL, "other": FULL}, default=[0], other=[0]),
        groups({"default": STATE}, default=[0]),
        groups({"elsewhere": FULL}, elsewhere=[0]),
    ):
        with pytest.raises(TopologyError, match="to map layer l0"):
            merge_draft_modules(target, [draft])


def test_h26_source_layers_out_of_order_or_partial():
    layers = tuple(Layer(name=f"l{i}", tags=("full",)) for i in range(2))
    swapped = Topology((Group(tag="full", spec=FULL, layers=("l1", "l0")),), layers=layers)
    with pytest.raises(TopologyError, match="all in order: l0, l1"):
        merge_draft_modules(HYBRID, [swapped])
    partial = groups({"full": FULL, "l0": STATE}, full=[0, 1], l0=[1])
    with pytest.raises(TopologyError, match="layers of draft group l0"):
        merge_draft_modules(HYBRID, [partial])


def test_places_in_a_group_must_be_places_in_the_pool():
    target = groups({"full": FULL, "lin": STATE}, full=[0], lin=[1, 2])
    with pytest.raises(TopologyError, match="2 before module 0 joins"):
        merge_draft_modules(target, [groups({"full": FULL}, full=[0])])


def test_one_block_table_serves_both_so_blocks_must_be_equal():
    for draft in (
        groups({"full": dataclasses.replace(FULL, block_size=4)}, full=[0]),
        Topology((Group(tag="full", spec=FULL, layers=("l0",), kernel_block_size=4),)),
        Topology((Group(tag="full", spec=FULL, layers=("l0",), policy=default_policy(GroupType.SWA)),)),
    ):
        with pytest.raises(TopologyError, match="of module 0's group full"):
            merge_draft_modules(HYBRID, [draft])


def test_modules_are_equally_long_and_own_their_caches():
    with pytest.raises(TopologyError, match="layers of module 1"):
        merge_draft_modules(HYBRID, [groups({"full": FULL}, full=[0]), groups({"full": FULL}, full=[0, 1])])
    with pytest.raises(TopologyError, match="layers of module 0"):
        merge_draft_modules(HYBRID, [Topology.of_specs([FULL])])
    layers = (Layer(name="l0", tags=("full",)), Layer(name="l1", cache_of="l0"))
    with pytest.raises(TopologyError, match="caches of their own"):
        merge_draft_modules(HYBRID, [Topology((Group(tag="full", spec=FULL, layers=("l0",)),), layers=layers)])
    with pytest.raises(TopologyError, match="groups with layers"):
        merge_draft_modules(Topology.of_specs([FULL]), [DRAFT])


def test_a_draft_marks_its_group_when_it_says_so():
    draft = Topology((Group(tag="full", spec=FULL, layers=("l0",), eagle=True),))
    merged = merge_draft_modules(HYBRID, [draft])
    assert merged.topology.eagle_groups == (HYBRID.group_index("full"),)
    assert HYBRID.eagle_groups == ()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.data())
@settings(max_examples=150)
def test_merging_keeps_places_and_loses_no_layer(num_groups, per_group, num_modules, length, data):
    tags = [f"g{i}" for i in range(num_groups)]
    specs = dict.fromkeys(tags, FULL)
    target = groups(specs, **{tag: range(i * per_group, (i + 1) * per_group) for i, tag in enumerate(tags)})
    used = data.draw(st.lists(st.sampled_from(tags), min_size=1, unique=True))
    module = groups(specs, **{tag: range(length) for tag in used})
    merged = merge_draft_modules(target, [module] * num_modules)
    assert len(merged.topology.layers) == len(target.layers) + num_modules * length
    assert merged.topology.restrict([layer.name for layer in target.layers]) == target
    for index, view in enumerate(merged.modules):
        assert view.tags == target.tags
        for place in range(length):
            layer = merged.topology.layers[merged.global_id(index, place)]
            assert layer.name == f"draft{index}.l{place}"
            assert layer.tags == view.layers[place].tags == module.layers[place].tags
            for tag in used:
                assert merged.topology.group(tag).layers.index(layer.name) == per_group + index * length + place

"""HKV against an installed LMCache 0.5.6: keys, formats, kernel groups, object groups, block ids, skips and lookup."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.chunks import plans
from hkv.chunks.detection import VLLM_HINTS, Hints, TensorView, discover_per_layer_formats
from hkv.chunks.kernel_groups import EngineGroupInfo, expand_block_ids, group_layers, slice_block_ids
from hkv.chunks.objects import hidden_dim_sizes, object_groups, object_layout, status_report
from hkv.chunks.plans import ChunkRow, longest_prefix
from hkv.errors import ConfigError, HKVError
from hkv.keys.blake3 import chunk_keys, kv_rank, none_hash
from hkv.layout.strided import dense_strides
from tests.chunks import installed_lmcache as lmcache

INSTALLED = importlib.util.find_spec("lmcache") is not None
KNOWN = frozenset({"lmcache-group-key", "lmcache-two-blocks"})
"""LMCache leaves blocks and strides out of a group's key, and guesses at two blocks; nothing else is excused."""

CHUNK = 12
"""Tokens per chunk where it does not matter: LMCache wants whole blocks of 2, 3 or 4."""

RANKS = st.integers(1, 255).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1)))
"""Processes, and the number of one of them."""

foreign_warnings = pytest.mark.filterwarnings("ignore")  # what torch, numba and LMCache say when they are imported

pytestmark = foreign_warnings


@pytest.mark.skipif(INSTALLED, reason="LMCache is installed, so nothing says that it is absent")
def test_absence_is_said():
    with pytest.raises(ConfigError, match=r"lmcache = 'not installed': expected LMCache 0\.5\.6"):
        lmcache.none_hash()


@pytest.mark.lmcache
def test_the_root_of_all_keys():
    assert none_hash() == lmcache.none_hash()


@pytest.mark.lmcache
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 17))
def test_chunk_keys(tokens, chunk):
    assert chunk_keys(tokens, chunk) == lmcache.chunk_keys(tokens, chunk)


@pytest.mark.lmcache
@given(RANKS, RANKS)
def test_ranks(of_all, of_this_machine):
    assert kv_rank(*of_all, *of_this_machine) == lmcache.kv_rank(*of_all, *of_this_machine)


@pytest.mark.lmcache
@given(st.data(), st.integers(1, 12))
@settings(max_examples=300)
def test_lookup_across_groups(data, num_chunks):
    chunks = st.frozensets(st.integers(0, num_chunks - 1))
    rows = data.draw(st.lists(st.tuples(chunks, st.integers(-1, num_chunks + 2)), min_size=1, max_size=4))
    found = longest_prefix([ChunkRow.of(present, window) for present, window in rows], num_chunks)
    assert found == lmcache.longest_prefix(rows, num_chunks)


@pytest.mark.lmcache
@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 200))
def test_skips_within_windows(per_chunk, per_window, blocks):
    per_window = min(per_window, per_chunk)
    assert plans.skip_in_window(per_chunk, per_window, blocks) == lmcache.skip_in_window(per_chunk, per_window, blocks)


@pytest.mark.lmcache
@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.data())
def test_block_ids_of_kernel_groups(groups, data):
    infos = [EngineGroupInfo(group, (layer,)) for layer, group in enumerate(groups)]
    ids = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=3, max_size=3))
    assert expand_block_ids(infos, ids) == lmcache.expand_block_ids(infos, ids)


@pytest.mark.lmcache
@given(st.lists(st.sampled_from([0, 16, 32, 64]), min_size=1, max_size=3), st.integers(0, 6), st.integers(0, 6))
def test_block_ids_of_a_range(per_block, start, length):
    ids = {group: list(range(100 * group, 100 * group + 30)) for group in range(len(per_block))}
    bounds = (16 * start, 16 * (start + length))
    ours, theirs = (outcome(f, ids, per_block, *bounds) for f in (slice_block_ids, lmcache.slice_block_ids))
    assert ours == theirs


def outcome(function, *arguments):
    """Result of a call, or "refused"."""
    try:
        return function(*arguments)
    except (ValueError, NotImplementedError, AssertionError):
        return "refused"


@st.composite
def layer_views(draw):
    """Tensors of a few layers as vLLM has them: ranks, dtypes, permutations, padded blocks, sizes that coincide."""
    kinds = draw(st.lists(st.sampled_from(["kv", "fused", "latent", "indexer"]), min_size=1, max_size=3, unique=True))
    blocks, slots, heads = draw(st.sampled_from([7, 2])), draw(st.sampled_from([4, 2])), draw(st.sampled_from([3, 2]))
    shapes = {
        "kv": draw(st.sampled_from([(2, blocks, slots, heads, 8), (blocks, 2, slots, heads, 8)])),
        "fused": (blocks, slots, heads, 16),
        "latent": (blocks, slots, 576),
        "indexer": (blocks, slots, 132),
    }
    views = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(kinds))
        dtype = "uint8" if kind == "indexer" else draw(st.sampled_from(["bfloat16", "bfloat16", "float16"]))
        views.append(permuted(draw, TensorView(shapes[kind], dtype), kind))
    return views


def permuted(draw, view, kind):
    """The view with two axes swapped in memory, or with blocks further apart; now and then both tight."""
    change = draw(st.sampled_from(["none", "none", "swap", "pad"]))
    strides = list(dense_strides(view.shape))
    if change == "swap" and view.rank >= 4:
        physical = [*view.shape[:-3], view.shape[-2], view.shape[-3], view.shape[-1]]
        strides = list(dense_strides(tuple(physical)))
        strides[-3], strides[-2] = strides[-2], strides[-3]
    if change == "pad" and kind != "kv":
        strides[0] += 64
    return TensorView(view.shape, view.dtype, tuple(strides))


hints = st.sampled_from([None, *VLLM_HINTS]).map(lambda name: Hints(name, on_cpu=True))


def ours(views, hint, infos=(), members=None):
    formats, seen = discover_per_layer_formats(views, "vllm", hint, members, KNOWN)
    return formats, group_layers(formats, seen, infos, KNOWN)


def theirs(views, hint, infos=(), members=None):
    found = lmcache.LayerGroups(views, hint, infos, members, CHUNK)
    return found.formats, found.kernel_groups


@pytest.mark.lmcache
@given(layer_views(), hints)
@settings(max_examples=300)
def test_formats_and_kernel_groups(views, hint):
    assert outcome(ours, views, hint) == outcome(theirs, views, hint)


@st.composite
def grouped_layers(draw):
    """Layers of one geometry each, in engine groups with windows, tags and recurrent flags."""
    infos, views = [], []
    for group in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from([(2, 9, 16, 2, 8), (9, 16, 576), (9, 16, 2, 16)]))
        layers = tuple(range(len(views), len(views) + draw(st.integers(1, 2))))
        views += [TensorView(shape)] * len(layers)
        per_block = draw(st.sampled_from([0, 16, 32]))
        window = draw(st.sampled_from([-1, -1, 16, 32, 64, 128, 256, 40]))
        tag = draw(st.sampled_from([0, 0, 0, 1, 2]))
        infos.append(EngineGroupInfo(group, layers, per_block, window, tag, draw(st.booleans())))
    return views, infos


def our_objects(views, infos, chunk, separate):
    groups = ours(views, Hints("NHD"), infos, [info.layer_indices for info in infos])[1]
    found = object_groups(groups, chunk, separate)
    regions = [region for entry in found for region in object_layout(groups, entry, chunk).regions]
    slots = [region.slots for region in sorted(regions, key=lambda region: region.group)]
    return found, slots, [group.num_blocks(chunk) for group in groups]


def their_objects(views, infos, chunk, separate):
    members = [info.layer_indices for info in infos]
    found = lmcache.LayerGroups(views, Hints("NHD"), infos, members, chunk, separate)
    return found.object_groups, found.slots_per_object(), found.blocks(chunk)


def our_status(views, infos, chunk, separate):
    groups = ours(views, Hints("NHD"), infos, [info.layer_indices for info in infos])[1]
    objects = our_objects(views, infos, chunk, separate)[0]
    return hidden_dim_sizes(groups), status_report(groups, objects, len(views))


def their_status(views, infos, chunk, separate):
    members = [info.layer_indices for info in infos]
    return lmcache.LayerGroups(views, Hints("NHD"), infos, members, chunk, separate).status()


@pytest.mark.lmcache
@pytest.mark.parametrize(("mine", "its"), [(our_objects, their_objects), (our_status, their_status)])
@given(grouped_layers(), st.sampled_from([32, 64, 128, 100]), st.booleans())
@settings(max_examples=200)
def test_object_groups_their_slots_and_status(mine, its, layers, chunk, separate):
    assert outcome(mine, *layers, chunk, separate) == outcome(its, *layers, chunk, separate)


def test_what_cannot_be_grouped_is_refused_by_name():
    with pytest.raises(HKVError, match="tensors"):
        ours([TensorView((3, 4))], Hints("NHD"))

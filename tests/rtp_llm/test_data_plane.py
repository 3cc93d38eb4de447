"""Moving blocks in RTP-LLM's pools, compiled, against the loops over elements, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm import data_plane
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.errors import LayoutError
from hkv.layout.views.numpy import numpy_dtype
from hkv.model.group_policy import LayerDescription
from hkv.spec import MLAAttention
from reference.dialects.rtp_llm import data_plane as reference
from reference.dialects.rtp_llm.pool_walk import walk_pools
from reference.paged.ragged_attention import attention as definition
from tests.rtp_llm.described import attention, one, recurrent, region, window

BLOCKS = 5


def planned(layers: Sequence[LayerDescription], sizes: Any = None, indexer: Any = None, **options: Any) -> PlannedCache:
    fields = {"block_size": 8, **options}
    modules = fields.pop("draft", None)
    draft = None if modules is None else DescribedModel(tuple(modules), sizes, indexer)
    described = DescribedModel(tuple(layers), sizes, indexer)
    return PlannedCache.of_layers(described, RtpOptions(**fields), num_blocks=BLOCKS, draft=draft)


FLOAT8 = attention(3, 4, "float8_e4m3fn")
LATENT = MLAAttention(block_size=8, head_size=132, dtype="float8_e4m3fn")
COMPRESSED = dataclasses.replace(one("csa", region(alignment=16)).caches[0])
CACHES = {
    "keys and values": planned([one("default", attention(2, 4, "bfloat16"))] * 2),
    "float8, scales, kernel blocks, drafts": planned(
        [one("default", FLOAT8)] * 2, kernel_block_size=4, draft=[one("default", FLOAT8)], modules=2
    ),
    "float8 latents": planned([one("default", LATENT)], (128, 4), kernel_block_size=2),
    "latents and an indexer": planned([one("default", MLAAttention(block_size=8, head_size=8))], (6, 2), 4),
    "states beside attention": planned(
        [one("full", attention(2, 8, "float16")), one("linear0", recurrent("float32"))], kernel_block_size=4
    ),
    "regions": planned(
        [LayerDescription(caches=(COMPRESSED, window("ring", entry_elems=3, entry_dtype="float32")))],
        pools="independent",
        block_size=256,
        kernel_block_size=128,
    ),
}


def homes(cache: PlannedCache) -> list[tuple[int, str]]:
    groups = (group for groups in (cache.plan.groups, *cache.plan.modules) for group in groups)
    return [(layer, group.tag) for group in groups for layer in group.layers]


def filled(cache: PlannedCache, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, np.uint8) for size in cache.pool_sizes]


def content(cache: PlannedCache, layer: int, tag: str, count: int, seed: int) -> dict[str, np.ndarray]:
    """Random bits for `count` states of every part."""
    random = np.random.default_rng(seed)
    found = {}
    for name, view in cache.layer_cache(layer, tag).parts.items():
        dtype = numpy_dtype(view.dtype)
        shape = (count, view.shape[1], *view.shape[3:])
        found[name] = np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    return found


def device(pools: Sequence[np.ndarray]) -> data_plane.Pools:
    return jax.device_put(tuple(pool.copy() for pool in pools))  # which the reference changes in place


def same(got: Sequence[Any], want: Sequence[np.ndarray]) -> bool:
    return all(np.asarray(a).tobytes() == b.tobytes() for a, b in zip(got, want, strict=True))


@functools.cache
def data_bytes(name: str) -> list[np.ndarray]:
    """Bytes of each pool that some part of some layer lies in."""
    masks = [np.zeros(size, bool) for size in CACHES[name].pool_sizes]
    for element in walk_pools(CACHES[name].plan):
        masks[element.pool][element.address : element.address + element.size] = True
    return masks


names = st.sampled_from(sorted(CACHES))
ids = st.integers(-1, BLOCKS)


@given(st.data(), names)
@settings(max_examples=12)
def test_write(data: st.DataObject, name: str) -> None:
    cache = CACHES[name]
    layer, tag = data.draw(st.sampled_from(homes(cache)))
    pages, _ = cache.pages_of(layer, tag)
    per_block = pages.kv.states_per_block
    slots = data.draw(st.lists(st.integers(0, BLOCKS * per_block - 1), min_size=3, max_size=3, unique=True))
    blocks, states = [slot // per_block for slot in slots], [slot % per_block for slot in slots]
    blocks[2] = data.draw(st.sampled_from([-1, BLOCKS, blocks[2]]))
    pools, values = filled(cache, 0), content(cache, layer, tag, 3, 1)
    got, dropped = data_plane.write(
        device(pools), cache, layer, tag, np.int32(blocks), np.int32(states), jax.device_put(values)
    )
    assert int(dropped) == reference.write(pools, cache, layer, tag, blocks, states, values)
    assert same(got, pools)


@given(st.data(), names)
@settings(max_examples=12)
def test_gather_and_scatter(data: st.DataObject, name: str) -> None:
    cache = CACHES[name]
    layer, tag = data.draw(st.sampled_from(homes(cache)))
    table = data.draw(st.lists(ids, min_size=3, max_size=3, unique=True))
    pools = filled(cache, 2)
    dtypes = {part: numpy_dtype(view.dtype) for part, view in cache.layer_cache(layer, tag).parts.items()}
    found, dropped = data_plane.gather(device(pools), cache, layer, tag, np.int32(table))
    want, missing = reference.gather(pools, cache, layer, tag, table, dtypes)
    assert (list(found), int(dropped)) == (list(want), missing)
    assert same(list(found.values()), list(want.values()))
    values = content(cache, layer, tag, len(next(iter(want.values()))), 3)
    got, dropped = data_plane.scatter(device(pools), cache, layer, tag, np.int32(table), jax.device_put(values))
    assert int(dropped) == reference.scatter(pools, cache, layer, tag, table, values)
    assert same(got, pools)


@given(st.data(), names)
@settings(max_examples=12)
def test_copy_and_zero(data: st.DataObject, name: str) -> None:
    """Copies follow the spans of `Addresses.copies`, which are RTP-LLM's own."""
    cache = CACHES[name]
    tag = data.draw(st.sampled_from(sorted(cache.pages)))
    sources = data.draw(st.lists(ids, min_size=3, max_size=3))
    targets = data.draw(st.lists(ids, min_size=3, max_size=3, unique=True))
    pools = filled(cache, 4)
    got, dropped = data_plane.copy(device(pools), cache, tag, np.int32(sources), np.int32(targets))
    assert int(dropped) == reference.copy(pools, cache, tag, sources, targets)
    for moved, want, carries in zip(got, pools, data_bytes(name), strict=True):
        assert (np.asarray(moved)[carries] == want[carries]).all(), "RTP-LLM copies padding too, which nobody reads"
    got, dropped = data_plane.zero(device(pools), cache, tag, np.int32(targets))
    assert int(dropped) == reference.zero(pools, cache, tag, targets)
    assert same(got, pools)


def test_a_kernel_block_is_a_part_of_its_block() -> None:
    """RTP-LLM's dual index: block p is kernel blocks `p * kernel_blocks` and on."""
    cache = CACHES["float8, scales, kernel blocks, drafts"]
    pools = filled(cache, 5)
    whole, _ = data_plane.gather(device(pools), cache, 1, None, np.int32([3, 2]))
    parts, _ = data_plane.gather(device(pools), cache, 1, None, np.int32([6, 7, 4, 5]), in_kernel_blocks=True)
    for part in whole:
        assert np.asarray(whole[part]).tobytes() == np.asarray(parts[part]).tobytes()
    values = {part: jnp.asarray(array) for part, array in content(cache, 1, "default", 2, 6).items()}
    one_way, _ = data_plane.write(device(pools), cache, 1, None, np.int32([3, 2]), np.int32([5, 2]), values)
    other, _ = data_plane.write(
        device(pools), cache, 1, None, np.int32([7, 4]), np.int32([1, 2]), values, in_kernel_blocks=True
    )
    assert same(one_way, [np.asarray(pool) for pool in other])


def test_what_does_not_exist_is_refused() -> None:
    cache = CACHES["keys and values"]
    pools = device(filled(cache, 8))
    with pytest.raises(LayoutError, match="one of key, value"):
        data_plane.gather(pools, cache, 0, None, np.int32([1]), ["latent"])
    with pytest.raises(LayoutError, match="one of default"):
        data_plane.zero(pools, cache, "full", np.int32([1]))
    with pytest.raises(LayoutError, match="the index of a layer"):
        data_plane.gather(pools, cache, 7, None, np.int32([1]))


@pytest.mark.parametrize(
    ("tag", "name", "kernel"), [("default", "keys and values", 8), ("full", "states beside attention", 4)]
)
def test_attention_reads_a_layers_pages(tag: str, name: str, kernel: int) -> None:
    """Two rows of queries over blocks out of order against the definition; kernel blocks read the same."""
    cache, rng = CACHES[name], np.random.default_rng(3)
    pages, index = cache.pages_of(0, tag)
    (layout,) = pages.layouts
    heads, size = layout.content[0].heads, layout.content[0].shape[0]
    dtypes = {part.name: numpy_dtype(part.dtype) for part in layout.content}
    pools, table = data_plane.on_device(cache), np.array([[3, 1], [4, 0]], np.int32)
    for block in (1, 3, 4):
        values = {part: jnp.asarray(rng.standard_normal((8, heads, size)), dtype) for part, dtype in dtypes.items()}
        where = np.full(8, block, np.int32), np.arange(8, dtype=np.int32)
        pools, dropped = data_plane.write(pools, cache, 0, tag, *where, values)
        assert dropped == 0
    query = rng.standard_normal((5, 2 * heads, size)).astype(np.float32)
    starts, lengths = np.array([0, 2, 5], np.int32), np.array([13, 6], np.int32)
    want = definition(np.asarray(pools[pages.pool]), layout, index, query, table, starts, lengths, dtypes, window=7)
    found = data_plane.attention(pools, cache, 0, tag, query, table, starts, lengths, window=7)
    np.testing.assert_allclose(found, want, atol=1e-5)
    ratio = 8 // kernel
    small = np.where(table[:, :, None] > 0, table[:, :, None] * ratio + np.arange(ratio), -1).reshape(2, -1)
    again = data_plane.attention(
        pools, cache, 0, tag, query, small.astype(np.int32), starts, lengths, in_kernel_blocks=True, window=7
    )
    np.testing.assert_allclose(again, want, atol=1e-5)


@pytest.mark.parametrize(("name", "kernel"), [("latents and an indexer", 8), ("float8 latents", 2)])
def test_attention_reads_latents_and_what_is_rotated(name: str, kernel: int) -> None:
    """As above, over pages of MLA: keys are latents and rotated elements, values latents, with their scales."""
    cache, rng = CACHES[name], np.random.default_rng(5)
    pages, index = cache.pages_of(0, None)
    layout = pages.layouts[0]
    sizes = {part.name: part.shape[0] for part in layout.content}
    dtypes = {part.name: numpy_dtype(part.dtype) for part in layout.content}
    pools, table = data_plane.on_device(cache), np.array([[3, 1], [4, 0]], np.int32)
    for block in (1, 3, 4):
        values = {part: jnp.asarray(rng.standard_normal((8, 1, sizes[part])), dtypes[part]) for part in sizes}
        where = np.full(8, block, np.int32), np.arange(8, dtype=np.int32)
        pools, _ = data_plane.write(pools, cache, 0, None, *where, values)
    query = rng.standard_normal((5, 3, sizes["latent"] + sizes["rope"])).astype(np.float32)
    starts, lengths = np.array([0, 2, 5], np.int32), np.array([13, 6], np.int32)
    want = definition(np.asarray(pools[pages.pool]), layout, index, query, table, starts, lengths, dtypes)
    found = data_plane.attention(pools, cache, 0, None, query, table, starts, lengths)
    assert found.shape == (5, 3, sizes["latent"])
    np.testing.assert_allclose(found, want, atol=1e-4)
    small = np.where(table[:, :, None] > 0, table[:, :, None] * (8 // kernel) + np.arange(8 // kernel), -1)
    small = small.reshape(2, -1).astype(np.int32)
    again = data_plane.attention(pools, cache, 0, None, query, small, starts, lengths, in_kernel_blocks=True)
    np.testing.assert_allclose(again, want, atol=1e-4)


def test_attention_over_scaled_pages_is_refused() -> None:
    cache = CACHES["float8, scales, kernel blocks, drafts"]
    with pytest.raises(LayoutError, match="key_scale"):
        data_plane.attention(data_plane.on_device(cache), cache, 0, None, *(jnp.zeros((1, 1, 4)),) * 4)

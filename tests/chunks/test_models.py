"""Store, overwrite the pages, retrieve into other blocks: every byte is back, for caches of four kinds of model.

Geometries are the models' own, with fewer layers and blocks. Objects go through the memory tier to the disk tier and
come back after it was closed and opened again.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from hkv.chunks.detection import Hints, Nested, TensorView, discover_per_layer_formats
from hkv.chunks.formats import TRAITS, num_tensors
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, group_layers
from hkv.chunks.objects import ObjectGroup, ObjectLayout, object_groups, object_layout
from hkv.chunks.plans import ChunkRow, longest_prefix, null_chunks, plan_transfer
from hkv.chunks.transfer import Transfer, pack, unpack
from hkv.errors import OperationError
from hkv.keys.blake3 import ObjectKey, chunk_keys, kv_rank
from hkv.tier.disk import DiskTier
from hkv.tier.tier import MemoryTier

POISON = 0xA5
NUM_CHUNKS = 3
NULL = 0


@dataclasses.dataclass(frozen=True)
class Model:
    """Tensors and groups that an engine registers.

    Attributes:
      layers: a tensor a layer.
      infos: the engine's groups, one a kernel group.
      chunk: tokens per chunk.
      formats: format numbers expected, one a kernel group.
      kept: per kernel group, blocks of NUM_CHUNKS chunks that objects hold.
    """

    layers: Nested
    infos: tuple[EngineGroupInfo, ...]
    chunk: int
    formats: tuple[int, ...]
    kept: tuple[int, ...]


def sparse_latents(num_layers: int) -> Model:
    """DeepSeek-V3.2 and GLM-5: a latent of 512 + 64 bfloat16 and an indexer row of 132 bytes in each layer."""
    latent, indexer = TensorView((14, 64, 576)), TensorView((14, 64, 132), "uint8")
    infos = (
        EngineGroupInfo(0, tuple(range(0, 2 * num_layers, 2)), 64),
        EngineGroupInfo(0, tuple(range(1, 2 * num_layers, 2)), 64),
    )
    return Model([latent, indexer] * num_layers, infos, 256, (3, 14), (12, 12))


def gemma_3() -> Model:
    """Five layers of a window of 1,024 tokens to a full one; 8 heads of 128 with K and V in a row, blocks outermost."""
    row = TensorView((40, 16, 8, 256), strides=(6 * 16 * 8 * 256, 8 * 256, 256, 1))
    infos = (EngineGroupInfo(0, (0, 1, 2, 3, 4), 16, window=1024), EngineGroupInfo(1, (5,), 16))
    return Model([row] * 6, infos, 128, (13, 13), (24, 24))


def short_window() -> Model:
    """A window shorter than a chunk, K and V in planes: an object holds the end of each chunk only."""
    layer = TensorView((2, 30, 16, 4, 128))
    infos = (EngineGroupInfo(0, (0, 2), 16, window=32), EngineGroupInfo(1, (1, 3), 16))
    return Model([layer] * 4, infos, 128, (1, 1), (6, 24))


def qwen3_next() -> Model:
    """Attention of 2 heads of 256 over blocks of 544 tokens; states of linear attention in pages of the same bytes.

    A state page is 8,192 x 3 bfloat16 of convolution and 32 x 128 x 128 of recurrence, and padding. LMCache's view cuts
    it into one row for each of the block's 544 slots, rounded up to 16 bytes: 1,016 elements.
    """
    attention = TensorView((8, 544, 2, 512))
    state = TensorView((8, 544, 1, 1016), strides=(544 * 1024, 1016, 1016, 1))
    infos = (EngineGroupInfo(1, (0, 1, 2), 544, window=544, recurrent=True), EngineGroupInfo(0, (3,), 544))
    return Model([state] * 3 + [attention], infos, 544, (13, 13), (3, 3))


MODELS = {
    "DeepSeek-V3.2": sparse_latents(3),
    "GLM-5": sparse_latents(2),
    "Gemma-3": gemma_3(),
    "a window within a chunk": short_window(),
    "Qwen3-Next": qwen3_next(),
}


@dataclasses.dataclass
class Cache:
    """Pages of one model on the device, its groups and its objects' layouts."""

    model: Model
    groups: tuple[KernelGroup, ...]
    objects: tuple[ObjectGroup, ...]
    layouts: tuple[ObjectLayout, ...]
    tensors: list[tuple[jax.Array, ...]]

    @classmethod
    def of(cls, model: Model, seed: int) -> Cache:
        formats, views = discover_per_layer_formats(model.layers, "vllm", Hints("NHD"))
        groups = group_layers(formats, views, model.infos)
        assert tuple(group.geometry.format for group in groups) == model.formats
        objects = object_groups(groups, model.chunk, separate=True)
        layouts = tuple(object_layout(groups, entry, model.chunk) for entry in objects)
        generator = np.random.default_rng(seed)
        tensors = [
            tuple(
                generator.integers(0, 256, page_shape(group), dtype=np.uint8)
                for _ in range(num_tensors(TRAITS[group.geometry.format].structure, group.geometry.num_layers))
            )
            for group in groups
        ]
        return cls(model, groups, objects, layouts, tensors)

    def transfer(self, entry: int, group: int) -> Transfer:
        return Transfer(self.groups[group].geometry, self.layouts[entry].region(group))

    def pages(self, group: int) -> np.ndarray:
        """Uint8 `[tensors, pages, page stride]`."""
        return np.stack([np.asarray(tensor) for tensor in self.tensors[group]])


def page_shape(group: KernelGroup) -> tuple[int, int]:
    return group.geometry.pages_per_tensor, group.geometry.page_stride_bytes


def block_ids_of(cache: Cache, seed: int) -> list[list[int]]:
    """Per kernel group, different blocks of a random order, none of them the null block."""
    generator = np.random.default_rng(seed)
    found = []
    for group in cache.groups:
        order = 1 + generator.permutation(group.geometry.num_blocks - 1)
        found.append(order[: NUM_CHUNKS * group.num_blocks(cache.model.chunk)].tolist())
    return found


def key_of(chunk_hash: bytes, entry: int) -> bytes:
    key = ObjectKey(chunk_hash, "model", kv_rank(1, 0, 1, 0), entry)
    return key.chunk_hash + key.kv_rank.to_bytes(4, "big") + bytes([key.object_group_id])


def store(cache: Cache, block_ids: list[list[int]], keys: list[bytes], tier: MemoryTier) -> None:
    for index, entry in enumerate(cache.objects):
        absent = null_chunks(cache.groups, entry, block_ids, cache.model.chunk)
        buffers = {chunk: np.zeros((1, cache.layouts[index].nbytes), np.uint8) for chunk in range(NUM_CHUNKS)}
        present = [not missing for missing in absent]
        for launch in plan_transfer(cache.groups, entry, block_ids, cache.model.chunk, "store", present):
            (chunk,) = launch.objects
            transfer, tensors = cache.transfer(index, launch.group), cache.tensors[launch.group]
            transfer.check_call(tensors, buffers[chunk], launch.block_ids, launch.skip)
            ids, skip = np.int32(launch.block_ids), np.int32(launch.skip)
            buffers[chunk], dropped = pack(transfer, tensors, buffers[chunk], ids, skip)
            assert int(dropped) == 0
        for chunk, buffer in buffers.items():
            if present[chunk]:
                assert tier.store(key_of(keys[chunk], index), np.asarray(buffer)[0])


def retrieve(cache: Cache, block_ids: list[list[int]], keys: list[bytes], disk: DiskTier, skip_tokens: int = 0) -> int:
    """Chunks of the longest prefix that the tier serves, read into the pages."""
    rows = [
        ChunkRow.of([c for c in range(NUM_CHUNKS) if key_of(keys[c], index) in disk], entry.window)
        for index, entry in enumerate(cache.objects)
    ]
    found = longest_prefix(rows, NUM_CHUNKS)
    ids = [entry[: found.hit * cache.groups[g].num_blocks(cache.model.chunk)] for g, entry in enumerate(block_ids)]
    for index, entry in enumerate(cache.objects):
        present = [chunk in found.retained[index] for chunk in range(found.hit)]
        plan = plan_transfer(cache.groups, entry, ids, cache.model.chunk, "retrieve", present, skip_tokens)
        for launch in plan:
            stored = [disk.retrieve(key_of(keys[chunk], index)) for chunk in launch.objects]
            objects = np.stack([found.data for found in stored if found is not None])
            transfer = cache.transfer(index, launch.group)
            transfer.check_call(cache.tensors[launch.group], objects, launch.block_ids, launch.skip)
            cache.tensors[launch.group], dropped = unpack(
                transfer, cache.tensors[launch.group], objects, np.int32(launch.block_ids), np.int32(launch.skip)
            )
            assert int(dropped) == 0
    return found.hit


def kept_positions(cache: Cache, group: int, hit: int, skip_tokens: int = 0) -> list[int]:
    """Positions in a request's block list that a retrieve has to bring back, told from windows alone."""
    info, chunk = cache.groups[group].info, cache.model.chunk
    per_block = cache.groups[group].tokens_per_block
    positions = []
    for position in range(hit * chunk // per_block):
        end_of_chunk = ((position * per_block) // chunk + 1) * chunk
        in_window = info.window == -1 or position * per_block >= end_of_chunk - info.window
        last_chunks = info.window == -1 or end_of_chunk > hit * chunk - -(-info.window // chunk) * chunk
        if in_window and last_chunks and position >= skip_tokens // per_block:
            positions.append(position)
    return positions


def through_the_tiers(cache, folder, block_ids, keys):
    """Stores everything, drops it from memory to the disk, and overwrites all pages."""
    memory = MemoryTier(1 << 30)
    store(cache, block_ids, keys, memory)
    with DiskTier(folder, 1 << 30) as disk:
        for key in memory.keys:
            assert disk.store(key, np.asarray(memory.retrieve(key)))
            assert memory.evict(key)
    cache.tensors = [tuple(np.full_like(tensor, POISON) for tensor in group) for group in cache.tensors]


@pytest.mark.parametrize("skip_tokens", [0, 1], ids=["all", "after a skip"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_byte_comes_back(model, skip_tokens, tmp_path):
    cache = Cache.of(model, seed=1)
    before = [cache.pages(group) for group in range(len(cache.groups))]
    block_ids, other_ids = block_ids_of(cache, 2), block_ids_of(cache, 3)
    keys = chunk_keys(list(range(NUM_CHUNKS * model.chunk)), model.chunk)
    through_the_tiers(cache, tmp_path, block_ids, keys)
    skip_tokens *= model.chunk + max(group.tokens_per_block for group in cache.groups)
    with DiskTier(tmp_path, 1 << 30) as disk:
        assert retrieve(cache, other_ids, keys, disk, skip_tokens) == NUM_CHUNKS
    for index, group in enumerate(cache.groups):
        positions = kept_positions(cache, index, NUM_CHUNKS, skip_tokens)
        assert skip_tokens or len(kept_positions(cache, index, NUM_CHUNKS)) <= model.kept[index]
        expected = np.full_like(before[index], POISON)
        source = pages_of_blocks(group, [block_ids[index][position] for position in positions])
        target = pages_of_blocks(group, [other_ids[index][position] for position in positions])
        data = slice(0, group.geometry.page_bytes)
        expected[:, target, data] = before[index][:, source, data]
        assert np.array_equal(cache.pages(index), expected), f"kernel group {index}"
        assert positions


def pages_of_blocks(group: KernelGroup, blocks: list[int]) -> np.ndarray:
    """Pages of some blocks in each tensor: their ids, and again for the V plane behind the K plane."""
    planes = group.geometry.pages_per_tensor // group.geometry.num_blocks
    return np.concatenate([np.int64(blocks) + plane * group.geometry.num_blocks for plane in range(planes)])


def test_blocks_out_of_the_window_are_not_stored(tmp_path):
    """A windowed group whose early blocks became the null block: no object for them, and none is needed."""
    model = dataclasses.replace(
        gemma_3(), infos=(EngineGroupInfo(0, (0, 1, 2, 3, 4), 16, window=128), EngineGroupInfo(1, (5,), 16))
    )
    cache = Cache.of(model, seed=4)
    before = cache.pages(0)
    block_ids = block_ids_of(cache, 5)
    block_ids[0][:16] = [NULL] * 16
    keys = chunk_keys(list(range(NUM_CHUNKS * 128)), 128)
    through_the_tiers(cache, tmp_path, block_ids, keys)
    with DiskTier(tmp_path, 1 << 30) as disk:
        windowed = next(index for index, entry in enumerate(cache.objects) if entry.members == (0,))
        assert [key_of(key, windowed) in disk for key in keys] == [False, False, True]
        assert retrieve(cache, block_ids, keys, disk) == NUM_CHUNKS
    after, blocks = cache.pages(0), block_ids[0][16:]
    data = slice(0, cache.groups[0].geometry.page_bytes)
    assert np.array_equal(after[:, blocks, data], before[:, blocks, data])
    assert np.all(after[:, NULL] == POISON)


def test_a_lost_object_shortens_the_prefix(tmp_path):
    cache = Cache.of(MODELS["DeepSeek-V3.2"], seed=6)
    before = cache.pages(0)
    block_ids = block_ids_of(cache, 7)
    keys = chunk_keys(list(range(NUM_CHUNKS * 256)), 256)
    through_the_tiers(cache, tmp_path, block_ids, keys)
    with DiskTier(tmp_path, 1 << 30) as disk:
        disk.evict(key_of(keys[1], 0))
        assert retrieve(cache, block_ids, keys, disk) == 1
    after = cache.pages(0)
    assert np.array_equal(after[:, block_ids[0][:4]], before[:, block_ids[0][:4]])
    assert np.all(after[:, block_ids[0][4:]] == POISON)


def test_a_retrieve_that_lacks_an_object_moves_nothing():
    cache = Cache.of(MODELS["GLM-5"], seed=8)
    with pytest.raises(OperationError, match="no object for chunk 1"):
        plan_transfer(cache.groups, cache.objects[0], block_ids_of(cache, 9), 256, "retrieve", [True, False, True])

"""Chunk objects of a served cache: which parts of which layers' pages lie in one, and where (LMCache 0.5.6's rules).

A kernel group is one part (keys, values, a state) of the layers of a group that have it alike. So an object has tokens
before heads, and keys and values apart, whatever the order of the pool's axes: a cache of another order reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from hkv.cache.spans import leaves_states
from hkv.chunks.formats import EngineKVFormat
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry
from hkv.chunks.objects import ObjectGroup, ObjectLayout, object_groups, object_layout
from hkv.chunks.plans import blocks_per_window
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.errors import ConfigError
from hkv.serving.pages import LayerPages
from hkv.serving.serving import Serving


@dataclasses.dataclass(frozen=True)
class Member:
    """A part of some layers' pages, and the entries of a row of which a chunk's object holds them.

    Attributes:
      part: name of the part.
      layers: the layers, which are of one group and have the part alike.
      group: their group.
      per_chunk: entries of a row that a chunk has.
      kept: the last ones of them, which the object holds.
    """

    part: str
    layers: tuple[LayerPages, ...]
    group: int
    per_chunk: int
    kept: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """Objects of one kind: one for each chunk.

    Attributes:
      members: the parts that lie in it, one behind the other.
      window: chunks at a prefix's end that a request resumes from; -1 for all.
      layout: bytes of an object.
      tokens: tokens of a chunk.
    """

    members: tuple[Member, ...]
    window: int
    layout: ObjectLayout
    tokens: int


@dataclasses.dataclass(frozen=True)
class ChunkObjects:
    """Objects of a served cache.

    Attributes:
      chunk: tokens of a chunk, or a common multiple of those of all kinds of objects.
      entries: the kinds of objects.
      digest: 16 bytes that differ where the objects of two caches do.
    """

    chunk: int
    entries: tuple[Entry, ...]
    digest: bytes


def chunk_objects(serving: Serving, chunk: int | None = None) -> ChunkObjects:
    """The objects of a cache.

    Args:
      serving: the cache, on this host.
      chunk: tokens of a chunk; None for the fewest, of which every group has whole blocks.

    Raises:
      ConfigError: a cache without prefix caching, or in which chunks leave states behind inside them: the entry of
        such a state does not say how many tokens it stands after.
      LayoutError: a chunk that is no whole number of some group's blocks.
    """
    cache = serving.cache
    if not int(np.asarray(cache.parameters.cache)[CacheField.CACHING]):
        raise ConfigError("caching", False, "True: objects are called by their prefixes")
    groups = np.asarray(cache.parameters.groups)[: len(cache.block_sizes)]
    if leaves_states(cache.state):
        raise ConfigError("num_prefill_checkpoint_blocks", 1, "0: states at the ends of their blocks alone")
    infos = tuple(_info(index, size, groups[index]) for index, size in enumerate(cache.block_sizes))
    least = math.lcm(*(info.tokens_per_block for info in infos if info is not None))
    eagle = bool(groups[:, GroupField.EAGLE].any())
    return _described(serving.layers, infos, least if chunk is None else chunk, eagle)


def _info(index: int, size: int, fields: np.ndarray) -> EngineGroupInfo | None:
    """A group as LMCache knows it, its window what a request resumes from; None for groups that are never hit."""
    if not fields[GroupField.CACHEABLE]:
        return None
    if fields[GroupField.RECURRENT]:
        return EngineGroupInfo(index, (), size, window=size, recurrent=True)
    lookback = int(fields[GroupField.LOOKBACK])
    if fields[GroupField.UNIT] > 1 or fields[GroupField.HALVINGS] or lookback >= UNLIMITED or fields[GroupField.SINKS]:
        return EngineGroupInfo(index, (), size)
    return EngineGroupInfo(index, (), size, window=max(1, -(-lookback // size), int(fields[GroupField.NEED])) * size)


@functools.lru_cache(maxsize=32)
def _described(
    layers: tuple[LayerPages, ...], infos: tuple[EngineGroupInfo | None, ...], chunk: int, eagle: bool
) -> ChunkObjects:
    # An EAGLE hit is proved by the block behind it, which the end of a chunk is not: then whole chunks are kept.
    kernels, members = kernel_groups(layers, infos, chunk, whole=eagle)
    entries = tuple(
        Entry(tuple(members[index] for index in kind.members), _window(kind, eagle), layout, chunk)
        for kind in object_groups(kernels, chunk, separate=True, full_window=eagle)
        for layout in (object_layout(kernels, kind, chunk, full_window=eagle),)
    )
    told = [
        [(m.part, [layer.name for layer in m.layers], m.per_chunk, m.kept) for m in entry.members] for entry in entries
    ]
    regions = [[(*region.shape, region.dtype) for region in entry.layout.regions] for entry in entries]
    return ChunkObjects(chunk, entries, hashlib.sha256(repr((chunk, told, regions)).encode()).digest()[:16])


def kernel_groups(
    layers: Sequence[LayerPages], infos: Sequence[EngineGroupInfo | None], chunk: int, *, whole: bool
) -> tuple[list[KernelGroup], list[Member]]:
    """Parts that some layers of a group have alike, and which entries of a row a chunk's object holds of them.

    `infos` are of each group, None for those that no object holds; `whole` keeps all of a chunk of windows, too.
    """
    alike: dict[tuple[int, str, int, int, int, str], list[LayerPages]] = {}
    for layer in layers:
        layout = layer.layout
        for part in layout.content if infos[layer.group] else ():
            heads = layout.shape[2] if part.heads is None else part.heads
            key = (layer.group, part.name, layout.states_per_block, heads, math.prod(part.shape), part.dtype)
            alike.setdefault(key, []).append(layer)
    kernels: list[KernelGroup] = []
    members: list[Member] = []
    for (group, name, states, heads, size, dtype), found in alike.items():
        info, blocks = infos[group], found[0].layout.num_blocks
        assert info is not None
        geometry = PageGeometry(EngineKVFormat.NL_X_NB_BS_NH_HS, 1, len(found), blocks, states, heads, size, dtype)
        kernel = KernelGroup(tuple(layers.index(layer) for layer in found), geometry, info)
        kernel.check_chunk(chunk)
        counts = kernel.num_blocks(chunk), blocks_per_window(kernel, chunk, whole and not info.recurrent)
        kernels.append(kernel)
        members.append(Member(name, tuple(found), group, *counts))
    return kernels, members


def _window(kind: ObjectGroup, eagle: bool) -> int:
    """Chunks that a request resumes from; one more where EAGLE takes a hit back by a block."""
    return kind.window + eagle if kind.window > 0 else kind.window

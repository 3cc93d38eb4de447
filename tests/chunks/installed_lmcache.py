"""Asks an installed LMCache for its own answers, in HKV's types, so that HKV can be held against what it describes.

No GPU and no pages are needed: its formats, grouping, object groups, chunk keys, block ids and lookup are Python and a
small native library. Its transfer kernels are CUDA and are not driven.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Collection, Sequence
from typing import Any

from hkv.chunks.detection import Hints, TensorView
from hkv.chunks.formats import EngineKVFormat
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry
from hkv.chunks.objects import ObjectGroup
from hkv.chunks.plans import LookupResult
from hkv.errors import ConfigError

RELEASE = "0.5.6"


def require_lmcache() -> None:
    """Raises ConfigError unless LMCache 0.5.6 is installed."""
    try:
        found = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if found != RELEASE:
        raise ConfigError("lmcache", found, f"LMCache {RELEASE}")


def _module(name: str) -> Any:
    require_lmcache()
    # It would otherwise report its use over the network when it is imported.
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    return importlib.import_module(f"lmcache.{name}")


def chunk_keys(tokens: Sequence[int], chunk: int) -> list[bytes]:
    """LMCache's form of `hkv.keys.blake3.chunk_keys`, by its `TokenHasher`."""
    hasher = _module("v1.multiprocess.token_hasher").TokenHasher(chunk, "blake3")
    return hasher.compute_chunk_hashes(list(tokens))


def none_hash() -> bytes:
    """LMCache's form of `hkv.keys.blake3.none_hash`."""
    return _module("v1.multiprocess.token_hasher").TokenHasher(256, "blake3").none_hash


def kv_rank(world_size: int, global_rank: int, local_world_size: int, local_rank: int) -> int:
    """LMCache's form of `hkv.keys.blake3.kv_rank`, by its `ObjectKey`."""
    key = _module("v1.distributed.api").ObjectKey
    return key.ComputeKVRank(world_size, global_rank, local_world_size, local_rank)


def engine_group_infos(infos: Sequence[EngineGroupInfo]) -> list[Any]:
    """LMCache's own records of HKV's."""
    record = _module("v1.multiprocess.group_view").EngineGroupInfo
    return [
        record(
            engine_group_id=info.engine_group_id,
            layer_indices=info.layer_indices,
            tokens_per_block=info.tokens_per_block,
            sw_size_tokens=info.window,
            extra_object_group_tag=info.extra_tag,
            recurrent_state=info.recurrent,
        )
        for info in infos
    ]


def expand_block_ids(infos: Sequence[EngineGroupInfo], ids: Sequence[Any]) -> list[list[int]]:
    """LMCache's form of `hkv.chunks.kernel_groups.expand_block_ids`."""
    return _module("v1.multiprocess.group_view").expand_engine_block_ids(engine_group_infos(infos), ids)


def slice_block_ids(
    ids: dict[int, Sequence[int]], tokens_per_block: Sequence[int], start: int, end: int
) -> list[list[int]]:
    """LMCache's form of `hkv.chunks.kernel_groups.slice_block_ids`."""
    return _module("v1.multiprocess.group_view").slice_block_ids_per_group(ids, tokens_per_block, start, end)


def skip_in_window(per_chunk: int, per_window: int, blocks: int) -> int:
    """LMCache's form of `hkv.chunks.plans.skip_in_window`."""
    return _module("v1.multiprocess.object_group_transfer").recalculate_blocks_to_skip(per_chunk, per_window, blocks)


def longest_prefix(rows: Sequence[tuple[Collection[int], int]], num_chunks: int) -> LookupResult:
    """LMCache's form of `hkv.chunks.plans.longest_prefix`, of rows given as present chunks and windows."""
    bitmap = _module("lmcache_native").Bitmap
    present = []
    for chunks, _ in rows:
        bits = bitmap(num_chunks)
        for chunk in chunks:
            bits.set(chunk)
        present.append(bits)
    hit, kept = _module("v1.distributed.bitmap_ops").fold_unfold_grouped(present, [window for _, window in rows])
    return LookupResult(hit, tuple(tuple(bits.get_indices_list()) for bits in kept))


class LayerGroups:
    """LMCache's `KVLayerGroupsManager` over tensors that have shapes and strides but whose bytes nobody reads.

    Args:
      views: one tensor a layer.
      hints: facts that the engine, vLLM, reports besides.
      infos: engine groups of the kernel groups, in their order; or none.
      layers_of_engine_groups: layers of each engine group, for detection.
      chunk: tokens per chunk.
      separate: one object per window, recurrent flag and tag.
    """

    def __init__(
        self,
        views: Sequence[TensorView],
        hints: Hints,
        infos: Sequence[EngineGroupInfo] = (),
        layers_of_engine_groups: Sequence[Sequence[int]] | None = None,
        chunk: int = 256,
        separate: bool = False,
    ) -> None:
        grouping = _module("v1.kv_layer_groups")
        connector = _module("v1.gpu_connector.utils")
        engine = _module("utils").EngineType.VLLM
        groups = [list(range(len(views)))] if layers_of_engine_groups is None else layers_of_engine_groups
        said = {} if hints.kv_layout is None else {"kv_layout": hints.kv_layout}
        tensors, formats = connector.normalize_and_discover_per_layer_formats(
            [_torch_tensor(view) for view in views], groups, engine, said
        )
        self.formats = [EngineKVFormat(int(found)) for found in formats]
        self._infos = list(infos)
        self._chunk = chunk
        self._manager = grouping.KVLayerGroupsManager(tensors, formats, engine_group_infos(infos), chunk, separate)

    @property
    def kernel_groups(self) -> tuple[KernelGroup, ...]:
        """The kernel groups, as HKV has them."""
        return tuple(self._kernel_group(index) for index in range(self._manager.num_kernel_groups))

    def _kernel_group(self, index: int) -> KernelGroup:
        group = self._manager.kernel_groups[index]
        shape = group.shape_desc
        geometry = PageGeometry(
            EngineKVFormat(int(group.engine_kv_format)),
            shape.kv_size,
            shape.nl,
            shape.nb,
            shape.bs,
            shape.nh,
            shape.hs,
            str(group.dtype).removeprefix("torch."),
            shape.block_stride_elems,
        )
        layers = tuple(group.layer_indices)
        info = self._infos[index] if self._infos else EngineGroupInfo(0, layers)
        return KernelGroup(layers, geometry, info)

    @property
    def object_groups(self) -> tuple[ObjectGroup, ...]:
        """The object groups, windows and kinds as its descriptor for lookups has them."""
        described = self._manager.get_attn_desc()
        members = [tuple(group.kernel_group_indices) for group in self._manager.object_groups]
        return tuple(map(ObjectGroup, members, described.num_chunks_in_sw, described.group_kinds))

    def status(self) -> tuple[list[int], dict[str, Any]]:
        """Its `hidden_dim_sizes`, and its status report without the texts that describe formats."""
        context = _module("v1.platform.devices.cpu.cache_context").CPUCacheContext
        probe = object.__new__(type("Probe", (context,), {"__abstractmethods__": frozenset()}))
        probe.kv_layer_groups_manager_, probe.num_layers_ = self._manager, len(self.formats)
        found = probe.report_status()
        for group in found["kernel_groups"]:
            for text in ("engine_kv_concrete_shape", "engine_kv_shape", "attention_backend"):
                del group[text]
        return probe.hidden_dim_sizes, found

    def slots_per_object(self) -> list[int]:
        """Rows that each kernel group has in one object."""
        return [self._manager.get_slots_per_chunk_in_sw(index) for index in range(self._manager.num_kernel_groups)]

    def blocks(self, tokens: int) -> list[int]:
        """Whole pages of each kernel group that `tokens` tokens take up."""
        return [self._manager.calculate_num_blocks(i, tokens) for i in range(self._manager.num_kernel_groups)]


def _torch_tensor(view: TensorView) -> Any:
    torch = importlib.import_module("torch")
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    storage = torch.empty(view.offset + extent, dtype=getattr(torch, view.dtype))
    return storage.as_strided(view.shape, view.strides, view.offset)

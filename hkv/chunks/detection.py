"""Detection of an engine's format from the structure of its tensors and the engine's hints (LMCache 0.5.6)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from hkv.chunks.formats import INDEXER_ROW_BYTES, TRAITS, EngineKVFormat, Structure
from hkv.errors import LayoutError
from hkv.layout.strided import dense_strides
from hkv.spec.dtypes import item_bytes

Nested: TypeAlias = "TensorView | Sequence[Nested]"
"""Tensors as an engine hands them over: one, a list, or a list of lists or tuples."""

F = EngineKVFormat

VLLM_HINTS = MappingProxyType({"NHD": False, "HND": True, "BLHNC": True, "BLNHC": False})
"""Layout hints and whether they put heads before tokens."""


@dataclasses.dataclass(frozen=True)
class Hints:
    """Facts that an engine reports about its tensors besides the tensors; None where it says nothing.

    `kv_layout` is one of `VLLM_HINTS`, whose None means another on a CPU; `kv_list_layout` is SGLang's, `unified` or
    `k_v`. `tokens_per_block` is given where tensors do not show it, `num_kv_heads` and `head_dim` for a flat TensorRT-
    LLM pool.
    """

    kv_layout: str | None = None
    on_cpu: bool = False
    kv_list_layout: str | None = None
    tokens_per_block: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None

    @property
    def heads_first(self) -> bool:
        """True if a rank-4 or rank-5 tensor has heads before tokens."""
        name = self.kv_layout or ("HND" if self.on_cpu else "NHD")
        if name not in VLLM_HINTS:
            raise LayoutError("kv_layout", name, f"one of {', '.join(VLLM_HINTS)}")
        return VLLM_HINTS[name]


def recovered(tensors: Nested) -> Nested:
    """The tensors with every permuted view replaced by the allocation behind it; tuples become lists."""
    if isinstance(tensors, TensorView):
        return recover_contiguous_view(tensors)
    return [recovered(entry) for entry in tensors]


def detect(
    tensors: Nested, engine: str, hints: Hints, bugs: frozenset[str] = frozenset()
) -> tuple[EngineKVFormat, Nested]:
    """The format of tensors that all have one, and the tensors as that format sees them.

    vLLM's `[2, 2, slots, heads, elements]` may be the K and V planes of two blocks, or two blocks of K and V. LMCache
    0.5.6 takes it for planes without a word (bug `lmcache-two-blocks`). The engine is `vllm`, `sglang`, `trtllm` or
    `atom`.

    Raises:
      LayoutError: unknown engine, a structure that no rule knows, or one that two formats have.
    """
    vllm = functools.partial(_detect_vllm, bugs=bugs)
    detectors = {"vllm": vllm, "sglang": _detect_sglang, "trtllm": _detect_trtllm, "atom": _detect_atom}
    if engine not in detectors:
        raise LayoutError("engine", engine, f"one of {', '.join(detectors)}")
    return detectors[engine](recovered(tensors), hints)


def discover_per_layer_formats(
    tensors: Nested,
    engine: str,
    hints: Hints,
    layers_of_engine_groups: Sequence[Sequence[int]] | None = None,
    bugs: frozenset[str] = frozenset(),
) -> tuple[list[EngineKVFormat], Nested]:
    """A format for each layer, and the tensors as those formats see them; arguments and errors as of `detect`.

    Layers of one engine group, one shape and one dtype are detected together, by their first; layers of no group keep
    their tensor and the first format found, as a placeholder. `tensors` has one entry a layer, or is a cross-layer or
    K-and-V structure; without engine groups all layers are of one.
    """
    if len({leaf.shape for leaf in _leaves(tensors)}) == 1:
        found, seen = detect(tensors, engine, hints, bugs)
        if TRAITS[found].structure is not Structure.LAYER_LIST:
            return [found] * _num_layers(found, seen), seen
    layers = _layer_entries(tensors)
    groups = [list(range(len(layers)))] if layers_of_engine_groups is None else layers_of_engine_groups
    if not any(groups):
        raise LayoutError("layers_of_engine_groups", groups, "at least one layer in a group")
    formats: list[EngineKVFormat | None] = [None] * len(layers)
    for bucket in _buckets(layers, groups):
        found, seen = detect([layers[layer] for layer in bucket], engine, hints, bugs)
        for layer, view in zip(bucket, _layer_entries(seen), strict=True):
            formats[layer], layers[layer] = found, view
    placeholder = next(found for found in formats if found is not None)
    return [placeholder if found is None else found for found in formats], layers


def _detect_vllm(tensors: Nested, hints: Hints, bugs: frozenset[str]) -> tuple[EngineKVFormat, Nested]:
    heads_first = hints.heads_first
    if isinstance(tensors, TensorView):
        return F.NB_NL_TWO_BS_NH_HS, tensors
    first = tensors[0] if len(tensors) else None
    if isinstance(first, TensorView):
        if first.rank == 5 and first.shape[:2] == (2, 2) and "lmcache-two-blocks" not in bugs:
            ambiguity = "K and V planes of two blocks, and two blocks of K and V, have this shape"
            raise LayoutError("tensors", first.shape, f"other than two blocks: {ambiguity} (bugs: lmcache-two-blocks)")
        return _detect_vllm_layers(tensors, first, heads_first)
    if first is not None and all(isinstance(plane, TensorView) and plane.rank == 4 for plane in first):
        return _detect_planes([plane for plane in first if isinstance(plane, TensorView)]), tensors
    raise _unknown(tensors)


def _detect_vllm_layers(tensors: Nested, first: TensorView, heads_first: bool) -> tuple[EngineKVFormat, Nested]:
    if first.rank == 4:
        head_axis = 1 if heads_first else 2
        if _is_indexer(first) and first.shape[head_axis] == 1:
            return F.NL_X_NB_BSV_BSS, [_without_axis(view, head_axis) for view in _layer_entries(tensors)]
        return (F.NL_X_NB_NH_BS_CS if heads_first else F.NL_X_NB_BS_NH_CS), tensors
    if first.rank == 6 and first.shape[0] == 2 and first.shape[3] == 1:
        return F.NL_X_TWO_NB_NH_ONE_BS_HS, tensors
    if first.rank == 5 and first.shape[0] == 2:
        return (F.NL_X_TWO_NB_NH_BS_HS if heads_first else F.NL_X_TWO_NB_BS_NH_HS), tensors
    if first.rank == 5 and first.shape[1] == 2:
        return (F.NL_X_NB_TWO_NH_BS_HS if heads_first else F.NL_X_NB_TWO_BS_NH_HS), tensors
    if first.rank == 3:
        return (F.NL_X_NB_BSV_BSS if _is_indexer(first) else F.NL_X_NB_BS_HS), tensors
    raise _unknown(tensors)


def _detect_planes(planes: list[TensorView]) -> EngineKVFormat:
    one_head = all(plane.shape[2] == 1 for plane in planes)
    uneven = len({plane.shape[3] for plane in planes}) > 1
    if one_head and (len(planes) in (1, 3) or uneven):
        return F.NL_X_NP_X_NB_BS_ONE_HS
    if len(planes) == 2:
        return F.NL_X_TWO_X_NB_BS_NH_HS
    raise _unknown(planes)


def _detect_sglang(tensors: Nested, hints: Hints) -> tuple[EngineKVFormat, Nested]:
    if isinstance(tensors, TensorView) or not len(tensors):
        raise _unknown(tensors)
    first = tensors[0]
    if not isinstance(first, TensorView):
        inner = first[0]
        rank4 = isinstance(inner, TensorView) and inner.rank == 4
        return (F.TWO_X_NL_X_NB_BS_NH_HS if rank4 else F.TWO_X_NL_X_NBBS_NH_HS), tensors
    per_block = hints.tokens_per_block
    if hints.kv_list_layout == "unified":
        by_rank = {3: F.NL_X_NB_BS_HS, 4: F.NL_X_NB_BS_NH_HS}
        if first.rank not in by_rank:
            raise LayoutError("rank", first.rank, "3 or 4 in a unified list")
        return by_rank[first.rank], tensors
    if hints.kv_list_layout == "k_v" and per_block and first.rank == 3 and len(tensors) % 2 == 0:
        paged = [_paged(view, per_block) for view in _layer_entries(tensors)]
        return F.TWO_X_NL_X_NB_BS_NH_HS, [paged[: len(paged) // 2], paged[len(paged) // 2 :]]
    if per_block and first.rank == 3 and first.shape[1] == 1:
        paged = [_paged(view, per_block) for view in _layer_entries(tensors)]
        return F.NL_X_NB_BS_HS, [_without_axis(view, 2) for view in paged]
    return (F.NL_X_NB_BS_HS if per_block else F.NL_X_NBBS_ONE_HS), tensors


def _detect_trtllm(tensors: Nested, hints: Hints) -> tuple[EngineKVFormat, Nested]:
    if not isinstance(tensors, TensorView):
        if len(tensors) != 1 or not isinstance(tensors[0], TensorView):
            raise _unknown(tensors)
        tensors = tensors[0]
    if tensors.rank == 6:
        return F.NB_NL_TWO_NH_BS_HS, tensors
    geometry = (hints.num_kv_heads, hints.tokens_per_block, hints.head_dim)
    if tensors.rank != 4 or None in geometry:
        raise LayoutError("hints", geometry, "num_kv_heads, tokens_per_block and head_dim of a rank-4 pool")
    heads, per_block, head_dim = (size or 0 for size in geometry)
    if heads * per_block * head_dim != tensors.shape[3]:
        raise LayoutError("hints", geometry, f"sizes whose product is the pool's row of {tensors.shape[3]}")
    return F.NB_NL_TWO_NH_BS_HS, tensors.reshaped(*tensors.shape[:3], heads, per_block, head_dim)


def _detect_atom(tensors: Nested, hints: Hints) -> tuple[EngineKVFormat, Nested]:
    del hints
    first = None if isinstance(tensors, TensorView) or not len(tensors) else tensors[0]
    if isinstance(first, TensorView) and first.rank == 3:
        return F.NL_X_NB_BS_HS, tensors
    raise _unknown(tensors)


def _is_indexer(view: TensorView) -> bool:
    return view.dtype == "uint8" and view.shape[-1] == INDEXER_ROW_BYTES


def _without_axis(view: TensorView, axis: int) -> TensorView:
    shape = view.shape[:axis] + view.shape[axis + 1 :]
    strides = view.strides[:axis] + view.strides[axis + 1 :]
    return TensorView(shape, view.dtype, strides, view.offset)


def _paged(view: TensorView, tokens_per_block: int) -> TensorView:
    if view.shape[0] % tokens_per_block:
        raise LayoutError("tokens_per_block", tokens_per_block, f"a divisor of the tensor's {view.shape[0]} slots")
    return view.reshaped(view.shape[0] // tokens_per_block, tokens_per_block, *view.shape[1:])


def _layer_entries(tensors: Nested) -> list[Any]:
    return [tensors] if isinstance(tensors, TensorView) else list(tensors)


def _num_layers(found: EngineKVFormat, tensors: Nested) -> int:
    if isinstance(tensors, TensorView):
        return tensors.shape[1]
    first = tensors[0]
    assert TRAITS[found].structure is Structure.KV_LIST
    return 1 if isinstance(first, TensorView) else len(first)


def _leaves(tensors: Nested) -> list[TensorView]:
    if isinstance(tensors, TensorView):
        return [tensors]
    return [leaf for entry in tensors for leaf in _leaves(entry)]


def _signature(entry: Nested) -> Any:
    if isinstance(entry, TensorView):
        return (entry.shape, entry.dtype)
    return tuple(_signature(inner) for inner in entry)


def _buckets(layers: list[Any], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    buckets: list[list[int]] = []
    for group in groups:
        by_signature: dict[Any, list[int]] = {}
        for layer in group:
            if not 0 <= layer < len(layers):
                raise LayoutError("layers_of_engine_groups", layer, f"a layer index below {len(layers)}")
            by_signature.setdefault(_signature(layers[layer]), []).append(layer)
        buckets += by_signature.values()
    return buckets


def _unknown(tensors: Nested) -> LayoutError:
    return LayoutError("tensors", _signature(tensors), "a structure that a format of this engine has")


def plane_row_elements(planes: Sequence[TensorView]) -> int:
    """Elements, in the first plane's dtype, of a token's row over all planes (format 17)."""
    total = sum(plane.shape[-1] * item_bytes(plane.dtype) for plane in planes)
    size = item_bytes(planes[0].dtype)
    if total % size:
        raise LayoutError("planes", f"{total} bytes a token", f"a multiple of {planes[0].dtype}'s {size} bytes")
    return total // size


# A tensor as its shape, strides and dtype say, and the contiguous view that an engine's permuted view hides.


@dataclasses.dataclass(frozen=True)
class TensorView:
    """Shape, type and strides, in elements and None for contiguous, of an engine's tensor, without its bytes.

    `offset` is the first element within the storage; it never matters to a layout.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    strides: tuple[int, ...] = dataclasses.field(default=cast("tuple[int, ...]", None))
    offset: int = 0

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        if self.strides is None:
            object.__setattr__(self, "strides", dense_strides(self.shape))
        if len(self.strides) != len(self.shape) or any(size < 1 for size in self.shape):
            raise LayoutError("strides", self.strides, f"one for each axis of {self.shape}, every extent positive")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def reshaped(self, *shape: int) -> TensorView:
        """The same contiguous elements under another shape."""
        if self.strides != dense_strides(self.shape) or math.prod(shape) != math.prod(self.shape):
            raise LayoutError("shape", shape, f"{math.prod(self.shape)} elements of a contiguous view {self.shape}")
        return TensorView(shape, self.dtype, offset=self.offset)


def recover_contiguous_view(view: TensorView) -> TensorView:
    """The physical allocation behind a logically permuted view (LMCache 0.5.6, contiguous-view recovery).

    Axes are put in order of descending stride; among equal strides an axis of extent 1 goes innermost. Blocks may lie
    further apart than a block is long; LayoutError for every other gap, and for overlapping blocks.
    """
    order = sorted(range(view.rank), key=lambda axis: (-view.strides[axis], view.shape[axis] == 1))
    shape = tuple(view.shape[axis] for axis in order)
    strides = tuple(view.strides[axis] for axis in order)
    # Extents of 1 carry no stride information: a view is contiguous when the others are.
    dense = dense_strides(shape)
    if all(size == 1 or stride == tight for size, stride, tight in zip(shape, strides, dense, strict=True)):
        return _view_by_strides(view, shape, strides)
    _check_only_blocks_padded(view, shape, strides)
    return TensorView(shape, view.dtype, strides, view.offset)


def _view_by_strides(view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
    extents = [math.prod(shape) // strides[0] if strides[0] else shape[0]]
    extents += [
        outer // inner if inner else size
        for outer, inner, size in zip(strides[:-1], strides[1:], shape[1:], strict=True)
    ]
    if math.prod(extents) != math.prod(shape) or min(extents) < 1:
        extents = list(shape)
    return TensorView(tuple(extents), view.dtype, offset=view.offset)


def _check_only_blocks_padded(view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    inner_tight = len(shape) >= 2 and strides[-1] == 1 and strides[-2] == shape[-1]
    interior = all(strides[axis] == math.prod(shape[axis + 1 :]) for axis in range(1, len(shape) - 1))
    if not (inner_tight and interior and strides[0] >= math.prod(shape[1:])):
        expected = f"strides of shape {view.shape} that leave gaps between blocks only"
        raise LayoutError("strides", view.strides, expected)

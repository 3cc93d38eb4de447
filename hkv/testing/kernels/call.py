"""One call of a kernel: memory filled for a case, the arguments by name, and the result by definition.

A kernel asks for what it needs by the names of its parameters; `ARGUMENTS` is the whole vocabulary. Arrays are views of
one memory, so that the definition, which is `reference.paged` and `reference.chunks`, and the kernel are compared byte
for byte over all of it: what was to be written, what was to be left alone, inputs included.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hkv.chunks.formats import TRAITS, EngineKVFormat, num_tensors
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.layout.strided import StridedView, dense_strides
from hkv.layout.views.numpy import numpy_dtype, view
from hkv.spec.dtypes import item_bytes
from hkv.testing.kernels.cases import CHUNKED, Case, is_far
from hkv.testing.kernels.memory import MARGIN, PAGE, Memory
from hkv.testing.kernels.placement import SCALED, Placement
from reference.paged import operations
from reference.paged.quantization import quantize_per_tensor, quantize_per_token_head

PARTS = ("key", "value", "latent", "key_scale", "value_scale")

ARGUMENTS = MappingProxyType(
    {
        "key, value, latent, key_scale, value_scale": "new content, `[tokens, heads, elements]`",
        "values": "the same as a mapping by name",
        "key_cache, value_cache, ...": "one layer's part in the pool, its axes as `axes` says",
        "key_caches, value_caches, ...": "all layers' part, layers first",
        "kv_cache": "one layer's keys and values as one tensor, axes as allocated; `axes` where a cell has both",
        "buffer": "the whole pool, bytes",
        "layout": "the pool's `hkv.Layout`; only where it can be one",
        "layer": "index of the layer that is written or read",
        "slot_mapping": "int64 `[tokens]`, block * block_size + slot, -1 for padding",
        "blocks, states": "the same as int32 pairs; for `zero`, `blocks` are ids",
        "block_table, table": "int32 ids of manager blocks; `[requests, columns]` for attention",
        "kernel_block_table": "the same in kernel blocks, which axis B of a cache counts",
        "sources, targets": "int32 ids of blocks to copy",
        "block_mapping": "int64 `[pairs, 2]`, the same",
        "block_ids": "int32 ids of blocks to zero, or of chunks, object by object",
        "key_out, value_out, ...": "arrays for what is gathered; without them it is returned",
        "out": "array for what attention gives; without it, it is returned",
        "k_scale, v_scale": "numbers that wider keys and values are divided by; 1.0 as default, for other cases",
        "block_size, kernel_block_size, kernel_blocks": "slots of either block, and how many kernel blocks are one",
        "null_block": "the id that stands for no block, 0",
        "query, cu_q_lens, kv_lens, scale, window": "as `hkv.paged.attention` takes them",
        "tensors, objects, skip, geometry, region, transfer": "as `hkv.chunks` takes them",
    }
)
"""Names that a kernel's parameters may have."""


NO_NAN = np.uint8(0xBF)
"""Bits of a byte without one that is in the exponent of every floating-point type."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """A part of the pool whose axes a kernel chooses: `[..., rows, heads, slots, elements]`."""

    view: StridedView


@dataclasses.dataclass(frozen=True)
class Section:
    """A stretch of memory and what it holds."""

    name: str
    view: StridedView


class NoRows(StridedView):
    """A view of no rows, where an input or an output has no token or block; a layout's views have some."""

    def __post_init__(self) -> None:
        """Takes an axis of no elements."""

    @property
    def end(self) -> int:
        return self.offset

    def locate(self, byte: int) -> None:
        return None


class Call:
    """A case in memory, before a kernel has run.

    Args:
      case: the case.
      shared: as `Memory` takes it.
      guarded: a page that nobody may touch lies behind each input: a kernel that reads past the end of one ends its
        process, which has to be one of its own.

    Attributes:
      arguments: `StridedView`, `Cache`, lists and mappings of them, and plain values, by name.
      sections: the inputs and outputs.
      pool, end: first byte of the pool in memory, and the first one after it.
      values: new content by part, as the definition writes it.
      outputs: views of what the kernel gives back, by part or `out`.
      raw: new content that the kernel converts, by part.
      before: memory before the kernel ran.
    """

    def __init__(self, case: Case, shared: bool = False, guarded: bool = False) -> None:
        self.case, self._guarded = case, guarded and not is_far(case)
        self.guards: list[int] = []
        self.pool = self.end = MARGIN
        self.sections: list[Section] = []
        self.arguments: dict[str, Any] = {}
        self.outputs: dict[str, StridedView] = {}
        self.values: dict[str, np.ndarray] = {}
        self.raw: dict[str, np.ndarray] = {}
        self._random = np.random.default_rng(case.seed)
        self._pending: list[tuple[StridedView, np.ndarray]] = []
        self._placement: Placement | None = None
        if case.operation in CHUNKED:
            self._chunks()
        else:
            self._placement = case.placement()
            self.end = self.pool + -(-self.placement.end // 64) * 64 + 64
            self._cursor = self.end + MARGIN
            self._paged()
        self.memory = Memory(self._cursor + MARGIN, shared, tuple(self.guards))
        self._fill()
        self.before = self.memory.snapshot()

    @property
    def placement(self) -> Placement:
        """Addresses of the pool, counted from its first byte."""
        assert self._placement is not None, "chunks have no placement"
        return self._placement

    def shifted(self, found: StridedView) -> StridedView:
        """A view of the pool as a view of memory."""
        return dataclasses.replace(found, offset=found.offset + self.pool)

    # Arguments.

    def _paged(self) -> None:
        case, given = self.case, self.arguments
        for part in self.placement.content:
            given[f"{part.name}_cache"] = Cache(self.shifted(self.placement.rows_view(part.name, case.layer)))
            given[f"{part.name}_caches"] = Cache(self.shifted(self.placement.rows_view(part.name, None)))
        natural = self.placement.natural_view(case.layer) if case.content != SCALED else None
        if natural is not None:
            natural = self.shifted(natural)
            given["kv_cache"] = natural if self.placement.layout is None else Cache(natural)
        if self.placement.layout is not None:
            given["layout"] = self.placement.layout
        given["buffer"] = StridedView((self.end - self.pool,), (1,), self.pool, "uint8")
        given |= {"layer": case.layer, "null_block": 0, "block_size": case.block_size, "kernel_blocks": case.pieces}
        given["kernel_block_size"] = case.block_size // case.pieces
        _PREPARED[case.operation](self)

    def _write(self) -> None:
        case = self.case
        pairs = [divmod(slot, case.block_size) if slot >= 0 else (slot, 0) for slot in case.slots]
        self._integers("slot_mapping", case.slots, "int64")
        self._integers("blocks", [block for block, _ in pairs])
        self._integers("states", [state for _, state in pairs])
        if not case.source_dtype:
            self._new_values(len(case.slots))
            return
        self.raw = raw = {
            name: self._numbers(len(case.slots), name) for name in ("key", "value", "latent") if name in self._names
        }
        for name, scale in (("k_scale", case.scales[0]), ("v_scale", case.scales[1])):
            self.arguments[name] = scale
        for name, content in raw.items():
            self._content(name, content, case.source_dtype)
            dtype = numpy_dtype(case.dtype)
            if case.content == SCALED:
                quantised, scales = quantize_per_token_head(content, dtype)
                self.values |= {name: quantised, f"{name}_scale": scales[:, :, None]}
            else:
                self.values[name] = quantize_per_tensor(content, case.scales[name == "value"], dtype)
        self.arguments["values"] = {name: self.arguments[name] for name in raw}

    def _scatter(self) -> None:
        self._tables(self.case.table)
        self._new_values(len(self.case.table) * self.case.block_size)

    def _gather(self) -> None:
        case = self.case
        self._tables(case.table)
        for part in self.placement.content:
            shape = (len(case.table) * case.block_size, self._heads(part.name), *part.shape)
            self._output(part.name, f"{part.name}_out", shape, part.dtype)

    def _copy_blocks(self) -> None:
        self._integers("sources", self.case.table)
        self._integers("targets", self.case.targets)
        pairs = [id_ for pair in zip(self.case.table, self.case.targets, strict=True) for id_ in pair]
        self._integers("block_mapping", pairs, "int64", (len(pairs) // 2, 2))

    def _zero(self) -> None:
        self._integers("block_ids", self.case.table)
        self.arguments["blocks"] = self.arguments["block_ids"]

    def _attention(self) -> None:
        case = self.case
        rows, columns = len(case.tables), len(case.tables[0])
        self._integers("block_table", [block for row in case.tables for block in row], shape=(rows, columns))
        kernel = [k for row in case.tables for k in _kernel_ids(row, case.pieces)]
        self._integers("kernel_block_table", kernel, shape=(rows, columns * case.pieces))
        self.arguments["table"] = self.arguments["block_table"]
        self._integers("cu_q_lens", [0, *np.cumsum(case.queries).tolist()])
        self._integers("kv_lens", case.lengths)
        self.query = self._normal((sum(case.queries), case.heads * case.query_heads, case.key_size), case.dtype)
        self._content("query", self.query, case.dtype)
        self.scale = 0.75 * case.key_size**-0.5
        self.arguments |= {"scale": self.scale, "window": case.window or None}
        self._output("out", "out", (*self.query.shape[:2], case.value_size), case.dtype)

    def _tables(self, table: Sequence[int]) -> None:
        self._integers("block_table", table)
        self._integers("kernel_block_table", _kernel_ids(table, self.case.pieces))
        self.arguments["table"] = self.arguments["block_table"]

    def _chunks(self) -> None:
        case = self.case
        form = EngineKVFormat[case.layout]
        traits = TRAITS[form]
        stride = case.block_size * case.heads * case.key_size + case.padding if case.padding else 0
        sizes = (
            traits.kv_size,
            case.layers,
            case.blocks,
            case.block_size,
            case.heads,
            case.key_size,
            case.dtype,
            stride,
        )
        geometry = self.geometry = PageGeometry(form, *sizes)
        slots = len(case.table) // case.objects * case.block_size
        shape = (geometry.kv_size, case.layers, slots, case.heads * case.key_size)
        nbytes = geometry.kv_size * case.layers * slots * geometry.row_bytes
        region = self.region = Region(0, case.offset, slots, shape, case.dtype, nbytes)
        self._cursor = MARGIN
        pages = (geometry.pages_per_tensor, geometry.page_stride_bytes)
        count = num_tensors(traits.structure, case.layers)
        self.tensors = [self._section(f"tensor {index}", pages, "uint8") for index in range(count)]
        self.objects = self._section("objects", (case.objects, region.offset + nbytes + 6), "uint8")
        self.arguments |= {"tensors": self.tensors, "objects": self.objects, "skip": case.skip}
        self.arguments |= {"geometry": geometry, "region": region, "transfer": Deferred(geometry, region)}
        self._integers("block_ids", case.table)

    # Sections.

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.placement.content)

    def _heads(self, name: str) -> int:
        return self.placement.cells[name].shape[3]

    def _section(
        self, name: str, shape: tuple[int, ...], dtype: str, row_padding: int = 0, given: bool = False
    ) -> StridedView:
        item = item_bytes(dtype)
        strides = dense_strides((1, *shape[1:]), item)
        if row_padding:
            strides = (strides[0] + row_padding * item, *strides[1:])
        found = (StridedView if shape[0] else NoRows)(shape, strides, self._cursor, dtype)
        if given and self._guarded:  # aligned as allocations are: up to 63 bytes lie between the end and the guard
            size = -(-(found.end - self._cursor) // 64) * 64
            guard = -(-(self._cursor + size) // PAGE) * PAGE
            self.guards.append(guard)
            found = dataclasses.replace(found, offset=guard - size)
            self._cursor = guard + PAGE
        else:
            self._cursor = -(-found.end // 64) * 64 + 64
        self.sections.append(Section(name, found))
        return found

    def _content(self, name: str, content: np.ndarray, dtype: str) -> None:
        found = self._section(name, content.shape, dtype, self.case.row_padding, given=True)
        self._pending.append((found, content))
        self.arguments[name] = found

    def _integers(
        self, name: str, ids: Sequence[int], dtype: str = "int32", shape: tuple[int, ...] | None = None
    ) -> None:
        found = self._section(name, shape or (len(ids),), dtype, given=True)
        self._pending.append((found, np.array(ids, dtype).reshape(found.shape)))
        self.arguments[name] = found

    def _output(self, part: str, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.outputs[part] = self.arguments[name] = self._section(name, shape, dtype)

    def _new_values(self, count: int) -> None:
        for part in self.placement.content:
            dtype = numpy_dtype(part.dtype)
            shape = (count, self._heads(part.name), *part.shape)
            raw = self._random_bytes((*shape[:-1], shape[-1] * dtype.itemsize))
            self.values[part.name] = raw.view(dtype)
            self._content(part.name, self.values[part.name], part.dtype)
        self.arguments["values"] = {name: self.arguments[name] for name in self.values}

    def _numbers(self, count: int, name: str) -> np.ndarray:
        """Numbers to round: of all magnitudes that the cache's type has, and beyond; one row is zero."""
        shape = (count, self._heads(name), *self.placement.part(name).shape)
        numbers = self._random.normal(size=shape) * self._random.choice([0.02, 1.0, 30.0, 3000.0], (*shape[:2], 1))
        numbers[:1, :1] = 0
        if self.case.extremes:
            chosen = self._random.random(shape) < 0.2
            numbers[chosen] = self._random.choice([np.nan, np.inf, -np.inf], int(chosen.sum()))
        return numbers.astype(numpy_dtype(self.case.source_dtype))

    def _random_bytes(self, shape: tuple[int, ...] | int) -> np.ndarray:
        """Bytes of any value; without NaN payloads, those in which no element type has an exponent of ones alone."""
        found = self._random.integers(0, 256, shape, dtype=np.uint8)
        return found if self.case.payloads else found & NO_NAN

    def _normal(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self._random.normal(size=shape).astype(numpy_dtype(dtype))

    # Contents of memory.

    def _fill(self) -> None:
        array = self.memory.array
        if not self.memory.sparse:
            array[:] = self._random_bytes(array.size)
        else:
            array[self.end :] = self._random_bytes(array.size - self.end)
            for start, length in self._named_runs():
                first = max(0, start - 64)
                array[first : start + length + 64] = self._random_bytes(start + length + 64 - first)
        for where, content in self._pending:
            view(array, where)[...] = content
        if self.case.operation == "attention":
            self._fill_requests()

    def _named_runs(self) -> list[tuple[int, int]]:
        """Bytes of the blocks that a case names, and of their neighbours."""
        case = self.case
        ids = [*case.table, *case.targets, *(slot // case.block_size for slot in case.slots if slot >= 0)]
        named = {near for block in ids for near in (block - 1, block, block + 1) if 0 <= near < case.blocks}
        runs = [run for block in sorted(named) for run in self.placement.block_runs(case.layer, block)]
        return [(self.pool + start, length) for start, length in runs]

    def _fill_requests(self) -> None:
        """NaN or large numbers everywhere in the pool, and small ones in the slots that requests own."""
        case, pool = self.case, self.memory.array[self.pool : self.end]
        placement: Any = self.placement
        pool[:] = 0xFF
        if not case.poison:
            pool[:] = np.resize((64 * self._normal((997,), case.dtype)).view(np.uint8), pool.size)
        for row, length in zip(case.tables, case.lengths, strict=True):
            positions = range(length)
            blocks = [row[position // case.block_size] or -1 for position in positions]
            states = [position % case.block_size for position in positions]
            shapes = {part.name: (length, case.heads, *part.shape) for part in self.placement.content}
            values = {name: self._normal(shape, case.dtype) for name, shape in shapes.items()}
            operations.write(pool, placement, case.layer, blocks, states, values)


_PREPARED: Mapping[str, Callable[[Call], None]] = {
    name: getattr(Call, f"_{name}") for name in ("write", "gather", "scatter", "copy_blocks", "zero", "attention")
}


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A `hkv.chunks.transfer.Transfer` yet to be made: its module imports JAX, which not every kernel needs."""

    geometry: PageGeometry
    region: Region

    def made(self) -> Any:
        """The value itself."""
        return importlib.import_module("hkv.chunks.transfer").Transfer(self.geometry, self.region)


def _kernel_ids(table: Sequence[int], pieces: int) -> list[int]:
    """Ids of kernel blocks for ids of manager blocks; -1 stays -1, as does the null block's meaning: its own rows."""
    return [block * pieces + piece if block >= 0 else block for block in table for piece in range(pieces)]

"""The definition of each operation, which is the reference's, and what it leaves when an argument is mistaken.

Of chunks and of attention, mistakes are told by the definition itself: with another order of pages, with a window that
is one wider, with the rows of a table mixed up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import reference.chunks.transfer as chunk_reference
import reference.paged.ragged_attention as attention_reference
from hkv.chunks.formats import TRAITS, EngineKVFormat, num_tensors
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.layout.strided import StridedView
from hkv.layout.views.numpy import numpy_dtype, view
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.memory import MemorySnapshot
from hkv.testing.kernels.plans import Changes, same
from reference.paged import operations


def expected(call: Call) -> MemorySnapshot:
    """Memory as it must be after the kernel: what the reference leaves, and everything else as before."""
    case, after = call.case, call.before.copy()
    pool: Any = after.behind(call.pool)
    layout: Any = call.placement if case.operation not in ("pack", "unpack") else None
    match case.operation:
        case "write":
            pairs = [divmod(slot, case.block_size) if slot >= 0 else (slot, 0) for slot in case.slots]
            blocks, states = [block for block, _ in pairs], [state for _, state in pairs]
            operations.write(pool, layout, case.layer, blocks, states, call.values)
        case "scatter":
            operations.scatter(pool, layout, case.layer, case.table, call.values)
        case "gather":
            found, _ = operations.gather(pool, layout, case.layer, case.table, _dtypes(call))
            for name, content in found.items():
                _put(after, call.outputs[name], content)
        case "copy_blocks":
            operations.copy_blocks(pool, layout, case.table, case.targets)
        case "zero":
            operations.zero_blocks(pool, layout, case.table)
        case "attention":
            _put(after, call.outputs["out"], attention(call).astype(numpy_dtype(case.dtype)))
        case _:
            _move_chunks(call, after, call.geometry, call.region, case.table, case.skip)
    return after


def attention(call: Call, scale: float | None = None, **changes: Any) -> np.ndarray:
    """Attention by definition, float64; with other arguments, as a kernel that is mistaken about them has it."""
    case = call.case
    asked: dict[str, Any] = {
        "pool": call.before.behind(call.pool),
        "layout": call.placement,
        "layer": case.layer,
        "query": call.query,
        "table": case.tables,
        "cu_q_lens": [0, *np.cumsum(case.queries).tolist()],
        "kv_lens": case.lengths,
        "dtypes": _dtypes(call),
        "window": case.window or None,
        "scale": call.scale if scale is None else scale,
    }
    with np.errstate(all="ignore"):
        return attention_reference.attention(**(asked | changes))


def _dtypes(call: Call) -> dict[str, np.dtype]:
    return {part.name: numpy_dtype(part.dtype) for part in call.placement.content}


def _put(held: MemorySnapshot, where: StridedView, content: np.ndarray) -> None:
    """Writes an array into bytes that are held."""
    item = where.itemsize
    rows = content.astype(numpy_dtype(where.dtype), copy=False).reshape(where.shape)
    if held.dense is not None:
        view(held.dense, where)[...] = rows
        return
    for index in np.ndindex(*where.shape):
        start = where.address(*map(int, index))
        held[start : start + item] = np.frombuffer(rows[index].tobytes(), np.uint8)


def _move_chunks(
    call: Call, after: MemorySnapshot, geometry: PageGeometry, region: Region, ids: Sequence[int], skip: int
) -> None:
    assert after.dense is not None
    tensors = [view(after.dense, tensor) for tensor in call.tensors]
    move = chunk_reference.pack if call.case.operation == "pack" else chunk_reference.unpack
    move(geometry, region, tensors, view(after.dense, call.objects), ids, skip)


def chunk_explanations(call: Call, got: Changes) -> list[str]:
    """Names of the mistakes that explain every byte that a kernel of chunks changed."""
    return [name for name, left in _chunk_mistakes(call) if same(left, got)]


def _chunk_mistakes(call: Call) -> Iterator[tuple[str, Changes]]:
    case, geometry = call.case, call.geometry
    last = case.blocks - 1
    ids = list(case.table)
    reached = {
        "padding ids (-1) are not left out": [{"ids": [n if n >= 0 else other for n in ids]} for other in (last, 0)],
        "leading blocks to skip are moved": [{"skip": 0}],
        "blocks are off by one": [{"ids": [n + step if n >= 0 else n for n in ids]} for step in (1, -1)],
        "page padding is ignored": [{"block_stride": 0}],
        "the region's offset in the object is ignored": [{"offset": 0}],
        "the last block is left out": [{"ids": [*ids[:-1], -1]}],
    }
    for form in EngineKVFormat:
        traits = TRAITS[form]
        count = num_tensors(traits.structure, case.layers) == len(call.tensors)
        if form.name != case.layout and traits.kernel and count and traits.kv_size == geometry.kv_size:
            other = "heads and slots" if traits.heads_first != TRAITS[geometry.format].heads_first else "pages"
            reached.setdefault(f"{other} of a tensor are read in another order ({form.name})", []).append(
                {"format": form}
            )
    for name, changes in reached.items():
        for change in changes:
            own = dict(change)
            moved = {key: own.pop(key) for key in ("ids", "skip") if key in own}
            yield name, _chunks_left(call, own, **moved)


def _chunks_left(
    call: Call,
    own: Mapping[str, Any],
    ids: Sequence[int] | None = None,
    skip: int | None = None,
) -> Changes:
    """Bytes that the definition changes with other pages, region, ids or number of leading blocks."""
    after = call.before.copy()
    geometry = dataclasses.replace(call.geometry, **{name: value for name, value in own.items() if name != "offset"})
    region = dataclasses.replace(call.region, offset=own.get("offset", call.region.offset))
    table, leading = call.case.table if ids is None else ids, call.case.skip if skip is None else skip
    try:
        _move_chunks(call, after, geometry, region, table, leading)
    except (ValueError, IndexError):  # this format has other pages: no mistake that could be made here
        return np.zeros(0, np.int64), np.zeros(0, np.uint8)
    return after.changes(call.before)


def attention_explanations(call: Call) -> list[str]:
    """Names of the mistakes that explain a result of attention, as closely as rounding allows."""
    case = call.case
    found = view(call.memory.array, call.outputs["out"]).astype(np.float64)
    near = {"float32": 2e-4, "bfloat16": 3e-2, "float16": 4e-3}[case.dtype]
    lengths, group = case.lengths, case.query_heads
    order = np.arange(case.heads * group).reshape(case.heads, group).T.ravel()
    changes = {
        "the scale is left out": [{"scale": 1.0}, {"scale": case.key_size**-0.5}],
        "the window is off by one": [{"window": case.window + step} for step in (1, -1) if case.window + step > 0],
        "the window is ignored": [{"window": None}],
        "the causal mask is off by one, or lengths are": [{"kv_lens": [max(1, n - 1) for n in lengths]}],
        "rows of the table are mixed up": [
            {"table": table, "null_block": null}
            for table in (case.tables[::-1], case.tables[:1] * len(case.tables))
            for null in (0, -1)
        ],
        "query heads are grouped as every n-th, not as neighbours": [{"query": call.query[:, order], "back": order}],
        "another layer is read or written": [{"layer": layer} for layer in range(case.layers) if layer != case.layer],
        "queries of a request are taken for its first tokens": [{"query": call.query[::-1], "turn": True}],
    }
    names = []
    for name, variants in changes.items():
        for variant in variants:
            variant = dict(variant)
            back, turn = variant.pop("back", None), variant.pop("turn", False)
            try:
                other = attention(call, **variant)
            except (ValueError, AssertionError, IndexError):
                continue
            if back is not None:
                other = _ungrouped(other, back)
            if turn:
                other = other[::-1]
            if np.allclose(found, other, rtol=near, atol=near, equal_nan=True):
                names.append(name)
    return [*names, "slots that hold nothing for the query are read (NaN)"] if np.isnan(found).any() else names


def _ungrouped(result: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Heads of a result back in the order that queries had before `order` was taken of them."""
    back = np.empty_like(result)
    back[:, order] = result
    return back

"""Published byte bugs of hybrid caches, planted in plain kernels, one a function, as data.

Each kernel runs as it is over NumPy arrays and over torch tensors. `PLANTED` has, by name, the bug's number upstream,
the operation, the kernel, what is given to `hkv.testing.kernels`, and what the first line of the report has to say.
Kernels that compute addresses, as CUDA code does, take the pool as bytes, and what lies beyond it they do not write.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

SKIP = -1


@dataclasses.dataclass(frozen=True)
class Planted:
    """One bug: where it was published, the kernel that has it, and words of the first line of its report."""

    upstream: str
    operation: str
    kernel: Callable[..., Any]
    says: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


PLANTED: dict[str, Planted] = {}


def planted(upstream: str, operation: str, says: str, **options: Any) -> Callable[[Any], Any]:
    def made(kernel: Any) -> Any:
        PLANTED[kernel.__name__] = Planted(upstream, operation, kernel, says, options)
        return kernel

    return made


# Kernels by indexing, right but for what is planted in them.


def put(cache: Any, row: int, slot: int, content: Any) -> None:
    cache[row, slot] = content


def tokens(slot_mapping: Any) -> list[tuple[int, int]]:
    return [(token, slot) for token, slot in enumerate(slot_mapping.tolist()) if slot != SKIP]


def write_slots(pairs: Any, size: int, sides: Any) -> None:
    for token, slot in pairs:
        for cache, content in sides:
            put(cache, slot // size, slot % size, content[token])


# Kernels by address: pointers, strides in bytes, and bytes.


def strides_of(array: Any) -> list[int]:
    if hasattr(array, "data_ptr"):
        return [stride * array.element_size() for stride in array.stride()]
    return list(array.strides)


def start_of(array: Any, buffer: Any) -> int:
    if hasattr(array, "data_ptr"):
        return array.data_ptr() - buffer.data_ptr()
    return array.ctypes.data - buffer.ctypes.data


def item_of(array: Any) -> int:
    return array.element_size() if hasattr(array, "data_ptr") else array.itemsize


def raw(array: Any) -> np.ndarray:
    if hasattr(array, "data_ptr"):
        torch = importlib.import_module("torch")
        return array.contiguous().view(torch.uint8).numpy().ravel()
    return np.ascontiguousarray(array).view(np.uint8).ravel()


def store(buffer: Any, address: int, content: np.ndarray) -> None:
    size = len(buffer)
    if address >= 0 and address + len(content) <= size:
        buffer[address : address + len(content)] = (
            content if isinstance(buffer, np.ndarray) else buffer.new_tensor(content)
        )


def write_at(
    key: Any, value: Any, key_cache: Any, value_cache: Any, buffer: Any, slot_mapping: Any, address: Callable[..., int]
) -> None:
    """Writes element by element at `address(cache, side, slot, head, element)` counted from the cache's start."""
    for token, slot in tokens(slot_mapping):
        for side, (cache, content) in enumerate(((key_cache, key), (value_cache, value))):
            base, item = start_of(cache, buffer), item_of(cache)
            for head in range(content.shape[1]):
                bits = raw(content[token, head])
                for element in range(content.shape[2]):
                    where = base + address(cache, side, slot, head, element)
                    store(buffer, where, bits[element * item : (element + 1) * item])


@planted("v#42374 (review)", "write", "strides of heads and slots")
def heads_and_slots_swapped(key, value, key_cache, value_cache, buffer, slot_mapping):
    size = key_cache.shape[1]

    def address(cache, side, slot, head, element):
        row, slots, heads, elements = strides_of(cache)
        return slot // size * row + slot % size * heads + head * slots + element * elements

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("v#42374 (review)", "write", "slots and elements are swapped|strides of values")
def value_strides_transposed(key, value, key_cache, value_cache, buffer, slot_mapping):
    size = key_cache.shape[1]

    def address(cache, side, slot, head, element):
        row, slots, heads, elements = strides_of(cache)
        return slot // size * row + slot % size * elements + head * heads + element * slots

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("v#42374 (review)", "write", "block size is read from another axis")
def block_size_from_shape_2(key, value, key_cache, value_cache, buffer, slot_mapping):
    size = key_cache.shape[2]

    def address(cache, side, slot, head, element):
        row, slots, heads, elements = strides_of(cache)
        return slot // size * row + slot % size * slots + head * heads + element * elements

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("v#49012", "write", "block size is read from another axis", axes="BHND")
def block_size_from_dim_1(key, value, key_cache, value_cache, buffer, slot_mapping):
    size = key_cache.shape[1]

    def address(cache, side, slot, head, element):
        row, heads, slots, elements = strides_of(cache)
        return slot // size * row + slot % size * slots + head * heads + element * elements

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("v#27547", "write", "manager's block size")
def manager_block_size(key, value, key_cache, value_cache, buffer, slot_mapping, block_size):
    def address(cache, side, slot, head, element):
        row, slots, heads, elements = strides_of(cache)
        return slot // block_size * row + slot % block_size * slots + head * heads + element * elements

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("kvc#435", "write", "without gaps")
def page_padding_ignored(key, value, key_cache, value_cache, buffer, slot_mapping):
    size = key_cache.shape[1]

    def address(cache, side, slot, head, element):
        _, slots, heads, elements = strides_of(cache)
        page = max(slots * size, heads * cache.shape[2])
        return slot // size * page + slot % size * slots + head * heads + element * elements

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("kvc#434", "write", "offset")
def storage_offset_ignored(key, value, key_cache, value_cache, buffer, slot_mapping):
    size, first = key_cache.shape[1], min(start_of(key_cache, buffer), start_of(value_cache, buffer))

    def address(cache, side, slot, head, element):
        row, slots, heads, elements = strides_of(cache)
        return slot // size * row + slot % size * slots + head * heads + element * elements - first

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("xpu-kernels#445", "write", "32 bits")
def address_in_32_bits(key, value, key_cache, value_cache, buffer, slot_mapping):
    size = key_cache.shape[1]

    def address(cache, side, slot, head, element):
        item = item_of(cache)
        row, slots, heads, elements = (stride // item for stride in strides_of(cache))
        found = slot // size * row + slot % size * slots + head * heads + element * elements
        return (((found + (1 << 31)) % (1 << 32)) - (1 << 31)) * item

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("kvc#397", "write", "all keys")
def pool_taken_for_two_halves(key, value, key_cache, value_cache, buffer, slot_mapping):
    size, first = key_cache.shape[1], min(start_of(key_cache, buffer), start_of(value_cache, buffer))

    def address(cache, side, slot, head, element):
        _, slots, heads, elements = strides_of(cache)
        page = cache.shape[1] * cache.shape[2] * cache.shape[3] * item_of(cache)
        start = first - start_of(cache, buffer) + side * len(cache) * page
        return start + slot // size * page + slot % size * slots + head * heads + element * elements

    write_at(key, value, key_cache, value_cache, buffer, slot_mapping, address)


@planted("va#5647", "write", "padding tokens")
def padded_slots_written(key, value, key_cache, value_cache, slot_mapping):
    pairs = list(enumerate(slot_mapping.tolist()))
    write_slots(pairs, key_cache.shape[1], ((key_cache, key), (value_cache, value)))


@planted("v#36580", "write", "off by one")
def slot_of_the_next_token(key, value, key_cache, value_cache, slot_mapping):
    last = len(key_cache) * key_cache.shape[1] - 1
    pairs = [(token, slot + 1) for token, slot in tokens(slot_mapping) if slot < last]
    write_slots(pairs, key_cache.shape[1], ((key_cache, key), (value_cache, value)))


@planted("lm#5151", "write", "last tokens")
def tail_of_a_batch_left(key, value, key_cache, value_cache, slot_mapping):
    pairs = [(token, slot) for token, slot in tokens(slot_mapping) if token < len(key) // 4 * 4]
    write_slots(pairs, key_cache.shape[1], ((key_cache, key), (value_cache, value)))


@planted("v#52516", "write", "heads are mixed up or left out")
def last_head_left(key, value, key_cache, value_cache, slot_mapping):
    kept = max(1, key.shape[1] - 1)
    pairs = ((key_cache[:, :, :kept], key[:, :kept]), (value_cache[:, :, :kept], value[:, :kept]))
    write_slots(tokens(slot_mapping), key_cache.shape[1], pairs)


@planted("lm#2926", "write", "tail of each head")
def vectors_of_four(key, value, key_cache, value_cache, slot_mapping):
    def cut(array):
        return array[..., : array.shape[-1] // 4 * 4]

    pairs = ((cut(key_cache), cut(key)), (cut(value_cache), cut(value)))
    write_slots(tokens(slot_mapping), key_cache.shape[1], pairs)


@planted("v#57477", "write", "row stride of the inputs")
def dense_inputs_assumed(key, value, key_cache, value_cache, buffer, slot_mapping):
    def dense(array):
        if hasattr(array, "data_ptr"):
            return array.as_strided(array.shape, (array.shape[1] * array.shape[2], array.shape[2], 1))
        item = array.itemsize
        strides = (array.shape[1] * array.shape[2] * item, array.shape[2] * item, item)
        return np.lib.stride_tricks.as_strided(array, array.shape, strides)

    pairs = ((key_cache, dense(key)), (value_cache, dense(value)))
    write_slots(tokens(slot_mapping), key_cache.shape[1], pairs)


@planted("rtp 42060b158", "write", "another layer")
def layer_left_0(key, value, key_caches, value_caches, slot_mapping, layer):
    size = key_caches.shape[2]
    write_slots(tokens(slot_mapping), size, ((key_caches[0], key), (value_caches[0], value)))


@planted("lmcache-two-blocks (LMCache 0.5.6)", "write", "K/V and blocks", layouts=("LB2NHD", "L2BNHD"))
def two_blocks_taken_for_keys_and_values(key, value, kv_cache, slot_mapping):
    if kv_cache.shape[0] == 2:
        key_cache, value_cache = kv_cache[0], kv_cache[1]
    else:
        key_cache, value_cache = kv_cache[:, 0], kv_cache[:, 1]
    write_slots(tokens(slot_mapping), key_cache.shape[1], ((key_cache, key), (value_cache, value)))


@planted("kvc#433", "write", "scales are left", contents=("int8 with scales",), lacks=("own scales",))
def scales_not_stored(key, value, key_scale, value_scale, key_cache, value_cache, key_scale_cache, value_scale_cache,
                      slot_mapping):  # fmt: skip
    write_slots(tokens(slot_mapping), key_cache.shape[1], ((key_cache, key), (value_cache, value)))


def rounded(array: Any, scale: float, dtype: Any) -> Any:
    if hasattr(array, "data_ptr"):
        torch = importlib.import_module("torch")
        largest = torch.finfo(dtype).max
        return (array.to(torch.float32) / scale).clamp(-largest, largest).to(dtype)
    import ml_dtypes

    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(array.astype(np.float32) / np.float32(scale), -largest, largest).astype(dtype)


FP8 = {"dtypes": ("float8_e4m3fn",), "contents": ("keys and values",)}


@planted("I25: scale applied once", "write", "scale is lost", **FP8)
def scale_ignored(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    dtype = key_cache.dtype
    pairs = ((key_cache, rounded(key, 1, dtype)), (value_cache, rounded(value, 1, dtype)))
    write_slots(tokens(slot_mapping), key_cache.shape[1], pairs)


@planted("lm#4674", "write", "scale is lost, inverted or taken", **FP8)
def scale_of_keys_for_values(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    dtype = key_cache.dtype
    pairs = ((key_cache, rounded(key, k_scale, dtype)), (value_cache, rounded(value, k_scale, dtype)))
    write_slots(tokens(slot_mapping), key_cache.shape[1], pairs)


# Tables: gather and scatter.


def raw_zero(array: Any) -> Any:
    return np.zeros((), array.dtype) if isinstance(array, np.ndarray) else 0


@planted("rtp 266ce67b9", "gather", "manager blocks are taken for kernel blocks")
def table_not_expanded(key_cache, value_cache, block_table, key_out, value_out, kernel_blocks):
    size = key_cache.shape[1]
    for position, block in enumerate(block_table.tolist()):
        for cache, out in ((key_cache, key_out), (value_cache, value_out)):
            for piece in range(kernel_blocks):
                first = (position * kernel_blocks + piece) * size
                out[first : first + size] = cache[block + piece] if block > 0 else raw_zero(out)


@planted("v#47698", "gather", "expanded twice")
def table_expanded_twice(key_cache, value_cache, kernel_block_table, key_out, value_out, kernel_blocks):
    sides = ((key_cache, key_out), (value_cache, value_out))
    ids, size = kernel_block_table.tolist(), key_cache.shape[1]
    for position, row in enumerate(ids):
        for cache, out in sides:
            twice = row // kernel_blocks * kernel_blocks * kernel_blocks + row % kernel_blocks
            here = out[position * size : (position + 1) * size]
            here[:] = raw_zero(here) if row < kernel_blocks else cache[twice]


@planted("v#37228", "gather", "all keys", layouts=("LB2NHD", "LB2HND", "pool"))
def all_keys_first_assumed(key_cache, value_cache, kernel_block_table, key_out, value_out, kernel_blocks, buffer):
    size, item = key_cache.shape[1], item_of(key_cache)
    page = key_cache[0].shape[0] * key_cache.shape[2] * key_cache.shape[3] * item
    first = start_of(key_cache, buffer)
    for position, row in enumerate(kernel_block_table.tolist()):
        for side, (cache, out) in enumerate(((key_cache, key_out), (value_cache, value_out))):
            _, slots, heads, elements = strides_of(cache)
            for slot in range(size):
                for head in range(cache.shape[2]):
                    here = out[position * size + slot, head]
                    if row < kernel_blocks:
                        here[:] = raw_zero(here)
                        continue
                    where = first + (side * len(cache) + row) * page + slot * slots + head * heads
                    bits = buffer[where : where + elements * len(here)]
                    here[:] = bits.view(here.dtype)


@planted("v#50531", "scatter", "null block")
def null_block_written(key, value, key_cache, value_cache, kernel_block_table):
    size = key_cache.shape[1]
    for position, row in enumerate(kernel_block_table.tolist()):
        if row >= 0:
            key_cache[row] = key[position * size : (position + 1) * size]
            value_cache[row] = value[position * size : (position + 1) * size]


@planted("I5: bits, not numbers", "scatter", "payloads of NaN", dtypes=("float32",))
def nan_payloads_lost(key, value, key_cache, value_cache, kernel_block_table, kernel_blocks):
    size = key_cache.shape[1]
    for position, row in enumerate(kernel_block_table.tolist()):
        if row >= kernel_blocks:
            for cache, content in ((key_cache, key), (value_cache, value)):
                part = content[position * size : (position + 1) * size]
                part = part.clone() if hasattr(part, "clone") else part.copy()
                part[part != part] = float("nan")
                cache[row] = part


# Copies and zeroing.


def pairs_of(sources: Any, targets: Any) -> list[tuple[int, int]]:
    pairs = zip(sources.tolist(), targets.tolist(), strict=True)
    return [(source, target) for source, target in pairs if source >= 0 and target >= 0]


def copied(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def copy_all(pairs: Any, caches: Any, count: int) -> None:
    for cache in caches:
        held = [copied(cache[:, source * count : (source + 1) * count]) for source, _ in pairs]
        for content, (_, target) in zip(held, pairs, strict=True):
            cache[:, target * count : (target + 1) * count] = content


@planted("v#53505", "copy_blocks", "one after the other")
def copied_over_what_is_still_read(key_caches, value_caches, sources, targets, kernel_blocks):
    for pair in pairs_of(sources, targets):
        copy_all([pair], (key_caches, value_caches), kernel_blocks)


@planted("trt#12306", "copy_blocks", "only some parts")
def only_keys_copied(key_caches, value_caches, sources, targets, kernel_blocks):
    copy_all(pairs_of(sources, targets), (key_caches,), kernel_blocks)


@planted("v#51718 (review)", "copy_blocks", "manager blocks are taken for kernel blocks|part of each block")
def kernel_stride_for_manager_blocks(key_caches, value_caches, sources, targets):
    copy_all(pairs_of(sources, targets), (key_caches, value_caches), 1)


@planted("v test 240723d46", "copy_blocks", "belong to nobody", layouts=("LBNHC", "LBHNC"))
def whole_page_stride_copied(key_cache, value_cache, key_caches, value_caches, sources, targets, kernel_blocks, buffer):
    layer, row = strides_of(key_caches)[:2]
    first, size = min(start_of(key_caches, buffer), start_of(value_caches, buffer)), row * kernel_blocks
    held = {}
    for index in range(len(key_caches)):
        for source, target in pairs_of(sources, targets):
            here = first + index * layer
            held[here + target * size] = copied(buffer[here + source * size : here + (source + 1) * size])
    for where, content in held.items():
        buffer[where : where + size] = content


@planted("sg#31218", "copy_blocks", "block ids are taken for slots")
def pages_moved_as_tokens(key_caches, value_caches, sources, targets):
    size = key_caches.shape[2]
    for cache in (key_caches, value_caches):
        pairs = pairs_of(sources, targets)
        held = [copied(cache[:, source // size, source % size]) for source, _ in pairs]
        for content, (_, target) in zip(held, pairs, strict=True):
            cache[:, target // size, target % size] = content


@planted("v#35219", "zero", "only some parts")
def only_keys_zeroed(key_caches, value_caches, blocks, kernel_blocks):
    for block in blocks.tolist():
        if block >= 0:
            key_caches[:, block * kernel_blocks : (block + 1) * kernel_blocks] = raw_zero(key_caches)


@planted("v test (align 576)", "zero", "belong to nobody", layouts=("LBNHC", "LBHNC"))
def alignment_zeroed(key_caches, value_caches, blocks, kernel_blocks, buffer):
    layer, row = strides_of(key_caches)[:2]
    first = min(start_of(key_caches, buffer), start_of(value_caches, buffer))
    for index in range(len(key_caches)):
        for block in blocks.tolist():
            if block >= 0:
                where = first + index * layer + block * kernel_blocks * row
                buffer[where : where + kernel_blocks * row] = 0


@planted("v#43533", "zero", "only some layers")
def layers_that_share_left(key_caches, value_caches, blocks, kernel_blocks):
    for cache in (key_caches, value_caches):
        for block in blocks.tolist():
            if block >= 0:
                cache[0, block * kernel_blocks : (block + 1) * kernel_blocks] = raw_zero(cache)


# Attention, and chunks.


def attend(query, key_cache, value_cache, table, cu_q_lens, kv_lens, scale, window, *, beyond=0, wider=0):
    def numbers(array: Any) -> np.ndarray:
        found = array.to(importlib.import_module("torch").float32).numpy() if hasattr(array, "data_ptr") else array
        return np.asarray(found, np.float64)

    queries, group = numbers(query), query.shape[1] // key_cache.shape[2]
    result = np.zeros((*query.shape[:2], value_cache.shape[-1]))
    starts, lengths = cu_q_lens.tolist(), kv_lens.tolist()
    for row, length in enumerate(lengths):
        keys, values = (numbers(cache[table[row]]).reshape(-1, *cache.shape[2:]) for cache in (key_cache, value_cache))
        for token in range(starts[row], starts[row + 1]):
            position = length - (starts[row + 1] - token)
            low = 0 if window is None else max(0, position - window + 1 - wider)
            for head in range(query.shape[1]):
                seen = slice(low, position + 1 + beyond)
                scores = keys[seen, head // group] @ queries[token, head] * scale
                weights = np.exp(scores - scores.max())
                result[token, head] = weights / weights.sum() @ values[seen, head // group]
    if hasattr(query, "data_ptr"):
        torch = importlib.import_module("torch")
        return torch.from_numpy(result).to(query.dtype)
    return result.astype(query.dtype)


@planted("nano-vllm#213", "attention", "NaN|hold nothing")
def keys_beyond_the_written(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window):
    return attend(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window, beyond=1)


@planted("v#40019", "attention", "window is off by one|hold nothing")
def window_one_wider(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window):
    return attend(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window, wider=1)


@planted("vllm-backport#63", "attention", "rows of the table")
def stale_rows(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window):
    table = kernel_block_table[[0] * len(kernel_block_table)]
    return attend(query, key_cache, value_cache, table, cu_q_lens, kv_lens, scale, window)


def pack_as(geometry, region, tensors, objects, block_ids, skip):
    import reference.chunks.transfer as definition

    def array(one: Any) -> np.ndarray:
        return one.numpy() if hasattr(one, "data_ptr") else one

    tensors = [array(tensor) for tensor in tensors]
    definition.pack(geometry, region, tensors, array(objects), block_ids.tolist(), skip)


@planted("lm tests (engine_driven)", "pack", "heads and slots", layouts=("NL_X_NB_TWO_NH_BS_HS",))
def heads_and_slots_of_chunks_swapped(geometry, region, tensors, objects, block_ids, skip):
    from hkv.chunks.formats import EngineKVFormat

    other = dataclasses.replace(geometry, format=EngineKVFormat.NL_X_NB_TWO_BS_NH_HS)
    pack_as(other, region, tensors, objects, block_ids, skip)


@planted("lm#2206", "pack", "leading blocks")
def skipped_blocks_packed(geometry, region, tensors, objects, block_ids, skip):
    pack_as(geometry, region, tensors, objects, block_ids, 0)


@planted("dingo#234", "pack", "page padding")
def chunk_pages_taken_tight(geometry, region, tensors, objects, block_ids, skip):
    pack_as(dataclasses.replace(geometry, block_stride=0), region, tensors, objects, block_ids, skip)

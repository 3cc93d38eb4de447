"""Kernels without a defect, by indexing: they run over NumPy arrays and over torch tensors."""

from __future__ import annotations

import reference.chunks.transfer as definition
from tests.testing.kernels.planted import attend, copy_all, pack_as, pairs_of, raw_zero, tokens, write_slots


def write(key, value, key_cache, value_cache, slot_mapping):
    write_slots(tokens(slot_mapping), key_cache.shape[1], ((key_cache, key), (value_cache, value)))


def gather(key_cache, value_cache, kernel_block_table, key_out, value_out, kernel_blocks):
    size = key_cache.shape[1]
    for position, row in enumerate(kernel_block_table.tolist()):
        for cache, out in ((key_cache, key_out), (value_cache, value_out)):
            out[position * size : (position + 1) * size] = raw_zero(out) if row < kernel_blocks else cache[row]


def scatter(key, value, key_cache, value_cache, kernel_block_table, kernel_blocks):
    size = key_cache.shape[1]
    for position, row in enumerate(kernel_block_table.tolist()):
        if row >= kernel_blocks:
            for cache, new in ((key_cache, key), (value_cache, value)):
                cache[row] = new[position * size : (position + 1) * size]


def copy_blocks(key_caches, value_caches, sources, targets, kernel_blocks):
    copy_all(pairs_of(sources, targets), (key_caches, value_caches), kernel_blocks)


def zero(key_caches, value_caches, blocks, kernel_blocks):
    for cache in (key_caches, value_caches):
        for block in blocks.tolist():
            if block >= 0:
                cache[:, block * kernel_blocks : (block + 1) * kernel_blocks] = raw_zero(cache)


def attention(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window):
    return attend(query, key_cache, value_cache, kernel_block_table, cu_q_lens, kv_lens, scale, window)


def pack(geometry, region, tensors, objects, block_ids, skip):
    pack_as(geometry, region, tensors, objects, block_ids, skip)


def unpack(geometry, region, tensors, objects, block_ids, skip):
    pages = [tensor.numpy() if hasattr(tensor, "data_ptr") else tensor for tensor in tensors]
    chunks = objects.numpy() if hasattr(objects, "data_ptr") else objects
    definition.unpack(geometry, region, pages, chunks, block_ids.tolist(), skip)


KERNELS = (write, gather, scatter, copy_blocks, zero, attention, pack, unpack)

"""First tries at a writer in torch, written from docs/check-kernel.md alone, each with one mistake that it invites."""

# pyright: reportMissingImports=false

from __future__ import annotations


def writes_to_a_copy(key, value, key_cache, value_cache, slot_mapping):
    kept = slot_mapping >= 0
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.reshape(-1, *cache.shape[2:])[slot_mapping[kept]] = new[kept]


def takes_slot_0_for_padding(key, value, key_cache, value_cache, slot_mapping):
    size = key_cache.shape[1]
    for token in range(slot_mapping.numel()):
        slot = int(slot_mapping[token])
        if slot == 0:
            continue
        key_cache[slot // size, slot % size] = key[token]
        value_cache[slot // size, slot % size] = value[token]

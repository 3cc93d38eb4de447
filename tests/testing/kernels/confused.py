"""Mistakes that whoever writes a kernel makes first, planted in one writer that computes addresses from strides.

`planted` has what was published. Here each mistake is one number that the writer computes with, changed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.testing.kernels.planted import item_of, start_of, store, strides_of

BLOCK, SLOT, HEAD, ELEMENT = range(4)
AXES = ("blocks", "slots", "heads", "elements")


@dataclasses.dataclass(frozen=True)
class Writer:
    """A writer of keys and values: right as it is, wrong in the field that is changed.

    Attributes:
      cache: strides of a cache in bytes, from the right ones, the part and the element's size.
      rows: strides of new content, from the right ones and the content.
      place: block and slot of a slot id, from the id and the block size.
      kept: true for the ids that are written.
      slots: slot ids, from those that are given.
      parts: what is written to each cache.
    """

    cache: Callable[[list[int], str, int], list[int]] = lambda strides, part, item: strides
    rows: Callable[[list[int], Any], list[int]] = lambda strides, new: strides
    place: Callable[[int, int], tuple[int, int]] = lambda slot, size: (slot // size, slot % size)
    kept: Callable[[int, int], bool] = lambda slot, size: slot >= 0
    slots: Callable[[Any], Any] = lambda slots: slots
    parts: tuple[tuple[str, str], ...] = (("key", "key"), ("value", "value"))

    def __call__(self, key, value, key_cache, value_cache, buffer, slot_mapping) -> None:
        news, caches = {"key": key, "value": value}, {"key": key_cache, "value": value_cache}
        size = key_cache.shape[1]
        moves = list(enumerate(self.slots(slot_mapping).tolist()[: len(key)]))
        for part, source in self.parts:
            cache, new = caches[part], news[source]
            item = item_of(cache)
            strides, rows = self.cache(strides_of(cache), part, item), self.rows(strides_of(new), new)
            for token, slot in moves:
                if not self.kept(slot, size):
                    continue
                block, inside = self.place(slot, size)
                for head, element in itertools.product(range(new.shape[1]), range(new.shape[2])):
                    to = start_of(cache, buffer) + np.dot((block, inside, head, element), strides)
                    read = pointer(new) + int(np.dot((token, head, element), rows))
                    store(buffer, int(to), np.frombuffer(ctypes.string_at(read, item), np.uint8))


def pointer(array: Any) -> int:
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


def swap(strides: list[int], one: int, other: int) -> list[int]:
    strides = list(strides)
    strides[one], strides[other] = strides[other], strides[one]
    return strides


def words_of(slots: Any) -> Any:
    """64-bit ids as twice as many of 32 bits."""
    return slots.view(np.int32) if isinstance(slots, np.ndarray) else slots.view(importlib.import_module("torch").int32)


WRITERS = {
    f"strides of {AXES[one]} and {AXES[other]} are swapped{f'.* in the {parts[0]} cache alone' * (len(parts) == 1)}": [
        Writer(cache=lambda steps, part, item, one=one, other=other, parts=parts: (
            swap(steps, one, other) if part in parts else steps
        ))
    ]
    for one, other in ((HEAD, SLOT), (SLOT, ELEMENT), (BLOCK, SLOT), (BLOCK, HEAD), (HEAD, ELEMENT), (BLOCK, ELEMENT))
    for parts in (("key", "value"), ("key",), ("value",))
} | {
    "heads and elements of the inputs are swapped": [
        Writer(rows=lambda steps, new: swap(steps, 1, 2)),
        Writer(rows=lambda steps, new: [steps[0], steps[2], steps[2] * new.shape[1]]),
    ],
    "tokens and heads of the inputs are swapped": [
        Writer(rows=lambda steps, new: swap(steps, 0, 1)),
        Writer(rows=lambda steps, new: [new.shape[2] * steps[2], len(new) * new.shape[2] * steps[2], steps[2]]),
    ],
    "strides count elements, and are taken for bytes": [
        Writer(cache=lambda steps, part, item: [n // item for n in steps])
    ],
    "strides in bytes are taken to count elements": [Writer(cache=lambda steps, part, item: [n * item for n in steps])],
    "slot 0 is taken for padding": [Writer(kept=lambda slot, size: slot > 0)],
    "block 0 is taken for padding": [Writer(kept=lambda slot, size: slot >= size)],
    "only a part of each block is moved": [
        Writer(kept=lambda slot, size: slot >= 0 and slot % size > 0),
        Writer(kept=lambda slot, size: slot >= 0 and slot % size < size - 1),
    ],
    "strides of blocks and slots are swapped .or quotient and remainder": [
        Writer(place=lambda slot, size: (slot % size, slot // size))
    ],
    "slot ids are not divided by the block size": [
        Writer(place=lambda slot, size: (slot, 0)), Writer(place=lambda slot, size: (slot // size, slot)),
    ],
    "slot ids, which are int64, are read as int32": [Writer(slots=words_of)],
    "keys are taken for values too, or values for keys": [
        Writer(parts=(("key", "key"), ("value", "key"))), Writer(parts=(("key", "value"), ("value", "value"))),
        Writer(parts=(("key", "key"), ("key", "value"))),
    ],
}  # fmt: skip
"""Confused writers, by how the first line of their report begins, as a regular expression."""

"""Layouts: plain objects and flat arrays of one state."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reference.language import Column, Layout, Line, Part, Record, Table
from tests.lowering import harness, small
from tests.lowering.random_texts import draw


def random_cache():
    text = harness.module_of(draw(random.Random(3).randrange))
    layout = Layout(text.Cache)
    cache = harness.filled(text, layout, 20, 1)
    text.perform_all(cache, 20)
    return text, layout, cache


def test_numbers_are_the_objects_and_back():
    _, layout, cache = random_cache()
    arrays = layout.arrays_of(cache)
    again = layout.restored(arrays)
    assert layout.numbers_of(again) == layout.numbers_of(cache)
    assert all(array.dtype == np.int32 for array in arrays.values())
    assert layout.numbers_of(layout.restored(layout.numbers_of(cache))) == layout.numbers_of(cache)


def test_some_arrays_are_loaded_and_the_rest_stays():
    _, layout, cache = random_cache()
    before = layout.numbers_of(cache)
    layout.load(cache, {"x": 77, "numbers": [4] * 121})
    after = layout.numbers_of(cache)
    assert (after["x"], after["numbers"]) == (77, [4] * 120 + [0])
    assert {n for n in before if before[n] != after[n]} == {"x", "numbers"}


def test_a_table_grows_and_lines_lengthen():
    text, layout, cache = random_cache()
    layout.grow(cache, "items", 5)
    layout.lengthen(cache, "items", 2)
    arrays = layout.arrays_of(cache)
    assert len(arrays["items.rank"]) == 1 + 101 + 5
    assert len(arrays["items.line"]) == (1 + 101 + 5) * 5
    assert (arrays["items.rank"][-5:] == 0).all()
    text.perform_all(cache, 20)


def test_sizes_are_those_that_are_wanted():
    layout = Layout(small.text("").Cache)
    with pytest.raises(TypeError, match=r"sizes: expected \['items', .*\], got \['items'\]"):
        layout.make({"items": 3})


def test_places_below_0_are_refused_where_they_are_checked():
    layout = Layout(small.text("").Cache)
    cache = layout.make(small.SIZES, checked=True)
    for held in (cache.numbers, cache.items, cache.items[1].line, cache.left.numbers):
        with pytest.raises(IndexError, match="place -1: expected one from 0"):
            held[-1]
    with pytest.raises(IndexError, match="place -2"):
        cache.numbers[-2] = 1
    cache.numbers[3] = 1
    assert layout.restored(layout.arrays_of(cache)).numbers[3] == 1
    assert layout.make(small.SIZES).numbers[-1] == 0


class Node(Record):
    rank: int


class Other(Record):
    rank: int
    chain: Line[Node]


def test_names_of_fields_are_a_records_own_and_a_record_has_one_table():
    class Twice(Part):
        nodes: Table[Node]
        more: Table[Node]

    class Both(Part):
        nodes: Table[Node]
        others: Table[Other]

    with pytest.raises(TypeError, match="more: nodes has Node already"):
        Layout(Twice)
    assert {"nodes.rank", "others.rank", "others.chain"} == set(Layout(Both).arrays)


def test_what_is_neither_a_number_nor_a_record_is_refused():
    class Odd(Part):
        nodes: Table[Node]
        name: str

    class Lacking(Part):
        nodes: Table[Node]
        place: Column[Other, int]

    with pytest.raises(TypeError, match="name: expected int or a record of a table"):
        Layout(Odd)
    with pytest.raises(TypeError, match="Other: no table of Lacking"):
        Layout(Lacking)


def test_settings_are_known_by_name():
    assert Layout(small.text("").Cache).settings == {"config.few"}

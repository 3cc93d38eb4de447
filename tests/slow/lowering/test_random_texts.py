"""Thousands of random texts, with `HKV_RANDOM_TEXTS=0:4000`; else some hundreds."""

from __future__ import annotations

import os
import random

import pytest

from tests.lowering.harness import check_random_text
from tests.lowering.random_texts import draw

FIRST, END = map(int, os.environ.get("HKV_RANDOM_TEXTS", "1000:1300").split(":"))


@pytest.mark.parametrize("part", range(10))
def test_random_texts(part):
    seeds, copied = range(FIRST + part, END, 10), []
    for seed in seeds:
        source = draw(random.Random(seed).randrange, rules=2 + seed % 4, size=8 + seed % 17)
        try:
            if check_random_text(source, static=bool(seed % 2)):
                copied.append(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # One in a hundred still copies an array: read in a loop that does not change it, inside one that does.
    assert len(copied) <= 1 + len(seeds) // 30, copied

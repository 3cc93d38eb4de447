"""Random texts, run plainly and lowered: every array and scalar is equal, and no array is copied."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.harness import check_random_text
from tests.lowering.random_texts import draw


@given(st.data())
@settings(max_examples=10)
def test_texts_that_shrink(data):
    source = draw(lambda n: data.draw(st.integers(0, n - 1)), size=8)
    assert check_random_text(source, static=data.draw(st.booleans())) == 0, source


def test_larger_texts():
    for seed in range(10):
        assert check_random_text(draw(random.Random(seed).randrange), static=bool(seed % 2)) == 0

"""Draws of one property test, printed: `tests/test_deterministic.py` runs this in processes of different kinds."""

from __future__ import annotations

import hashlib
import importlib
import sys

from hypothesis import given
from hypothesis import strategies as st

import tests.conftest  # noqa: F401  # loads the profile that tests run under
from hkv.testing.strategies import HypothesisChoices, headers
from reference.state.free_queue import FreeQueue

DIGEST = hashlib.sha256()


@given(header=headers(), numbers=st.lists(st.integers()), text=st.text(), data=st.data())
def draw(header, numbers, text, data):
    queue = FreeQueue(range(1, header.num_blocks))
    seen = [queue.pop() for _ in range(HypothesisChoices(data).integer(0, header.num_blocks - 1))]
    DIGEST.update(repr((header, numbers, text, seen)).encode())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    draw()
    print(DIGEST.hexdigest())

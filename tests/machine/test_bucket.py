"""Sizes of arrays are rounded up so that few programs serve many, and large arrays not by much."""

import pytest

from hkv.machine.operations import bucket


@pytest.mark.parametrize(
    ("size", "least", "found"),
    [
        *((1, 256, 256), (257, 256, 1024), (1025, 256, 4096)),
        *((262_145, 256, 1 << 19), (1 << 19, 256, 1 << 19), ((1 << 19) + 1, 256, 1 << 20)),
        *(((1 << 20) + 1, 1024, 1 << 21), (6_000_000, 1024, 1 << 23), (9_000_000, 1024, 1 << 24)),
        *((5, 1 << 20, 1 << 20), (2_000_000, 1 << 20, 1 << 21)),  # never below what was there
    ],
)
def test_bucket(size, least, found):
    assert bucket(size, least) == found

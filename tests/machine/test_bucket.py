"""Sizes of arrays are rounded up so that few programs serve many, and large arrays not by much."""

import pytest

from hkv.errors import ConfigError
from hkv.machine.operations import bucket, nearest
from hkv.state.state import ENTRIES, Buckets


@pytest.mark.parametrize(
    ("size", "least", "found"),
    [
        *((1, 256, 256), (257, 256, 1024), (1025, 256, 4096)),
        *((262_145, 256, 1 << 19), (1 << 19, 256, 1 << 19), ((1 << 19) + 1, 256, 1 << 20)),
        *(((1 << 20) + 1, 1024, 1 << 21), (6_000_000, 1024, 6 << 20), (9_000_000, 1024, 5 << 21)),
        *((5, 1 << 20, 1 << 20), (2_000_000, 1 << 20, 1 << 21), (5, 1 << 23, 1 << 23)),  # never below what was there
    ],
)
def test_bucket(size, least, found):
    assert bucket(size, least) == found


@pytest.mark.parametrize(("size", "least", "found"), [(1, 8, 8), (1025, 8, 1032), (32_770, 512, 33_280)])
def test_nearest(size, least, found):
    assert nearest(size, least) == found


def test_every_entry_fits_its_word():
    """Four times an entry plus one, and two bits, is a positive int32."""
    sizes = {"blocks": 256, "requests": 8, "groups": 8, "row": 64, "chain": 64}
    most = Buckets(**sizes, keys=ENTRIES // 8 - 2)
    assert (most.keys + 1) * most.groups * 4 + 3 < 1 << 31
    with pytest.raises(ConfigError, match="keys"):
        Buckets(**sizes, keys=ENTRIES // 8 - 1)

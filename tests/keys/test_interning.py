"""Dense numbers for prefix keys."""

from __future__ import annotations

from hkv.keys.chained import Interner


def test_numbers_are_dense_and_stay() -> None:
    interner = Interner()
    assert interner.numbers([b"a", b"b", b"c"]) == [0, 1, 2]
    assert interner.numbers([b"b", b"d"], 1) == [1, 3]
    assert interner.keys == [b"a", b"b", b"c", b"d"]
    assert interner.places == [0, 1, 2, 2]
    assert len(interner) == 4
    assert interner.find(b"d") == 3
    assert interner.find(b"x") is None

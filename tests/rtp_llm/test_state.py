"""The mechanisms under RTP-LLM's rules, against sets, counters and lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import OperationError
from reference.state.id_bitmap import IdBitmap
from reference.state.lru import Lru
from reference.state.reference_counts import ReferenceCounts

IDS = st.integers(0, 9)


@given(steps=st.lists(st.tuples(st.booleans(), IDS)), reserved=st.integers(0, 3), count=st.integers(0, 12))
def test_a_bitmap_is_a_sorted_set(steps: list[tuple[bool, int]], reserved: int, count: int) -> None:
    bitmap, wanted = IdBitmap(10, reserved), set(range(reserved, 10))
    for add, id in steps:
        (bitmap.add if add else bitmap.discard)(id)
        (wanted.add if add else wanted.discard)(id)
    assert list(bitmap) == sorted(wanted)
    assert bitmap.smallest(count) == sorted(wanted)[:count]
    assert len(bitmap) == len(wanted)
    assert all((id in bitmap) == (id in wanted) for id in range(10))


@given(steps=st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), IDS)))
def test_references_are_counted_by_role(steps: list[tuple[str, bool, int]]) -> None:
    refs, wanted = ReferenceCounts(10, "ab"), {"a": Counter(), "b": Counter()}
    for role, add, id in steps:
        if add:
            refs.add(role, id)
            wanted[role][id] += 1
        elif wanted[role][id]:
            refs.drop(role, id)
            wanted[role][id] -= 1
        else:
            with pytest.raises(OperationError):
                refs.drop(role, id)
    for roles in ("a", "b", "ab"):
        totals = [sum(wanted[role][id] for role in roles) for id in range(10)]
        assert [refs.total(id, roles) for id in range(10)] == totals
        assert refs.busy(roles) == sum(total > 0 for total in totals)


@given(steps=st.lists(st.tuples(st.sampled_from(["put", "get", "peek", "remove"]), st.integers(0, 5))))
def test_an_lru_is_a_list_in_order_of_use(steps: list[tuple[str, int]]) -> None:
    lru: Lru[int, int] = Lru(capacity=4)
    wanted: list[int] = []
    for number, (name, key) in enumerate(steps):
        known = key in wanted
        if name == "put":
            left = lru.put(key, number)
            assert (left is not None) == (not known and len(wanted) == 4)
            if left is not None:
                assert left[0] == wanted.pop(0)
            wanted = [*(other for other in wanted if other != key), key]
        elif name == "get":
            assert (lru.get(key) is not None) == known
            wanted = [*(other for other in wanted if other != key), *[key] * known]
        elif name == "peek":
            assert (lru.peek(key) is not None) == known
        elif known:
            lru.remove(key)
            wanted.remove(key)
        assert list(lru) == wanted
        assert len(lru) == len(wanted)

"""Comparison of answers: exact, except for the order of removed events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hkv.contract.answer import Failure, failure_of
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import (
    AllocateOp,
    Allocation,
    CacheEvent,
    CacheState,
    ConnectorHit,
    Header,
    Hit,
    Offer,
    Reset,
)
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.oracle.record import differ

STATE = CacheState(free=[2, 1], refs={"3": 1}, rows={"r1": [[3], [0, 4]]}, cached={"3": (0, 4, "00ff")})
STORED = CacheEvent(type="stored", group=0, num_blocks=1, block_size=2, tokens=[1, 2], keys=["aa"], parent="")
OTHER = CacheEvent(type="stored", group=1, num_blocks=1, block_size=2, tokens=[1, 2], keys=["aa"], parent="")
REMOVED = [CacheEvent(type="removed", group=0, num_blocks=1, keys=[key]) for key in ("aa", "bb")]


DIFFERENT = [
    (Hit(2, [[1]], 0), Hit(4, [[1]], 0), "hit", 2, 4),
    (Hit(2, [[1], [2]], 0), Hit(2, [[1], [3]], 0), "blocks[1]", [2], [3]),
    (Hit(2, [[1]], 0), Hit(2, [[1]], 4), "shared_prefix", 0, 4),
    (Allocation([[1]]), Allocation(None), "blocks", [[1]], None),
    (Reset(True), Reset(False), "ok", True, False),
    ([(1, 2)], [], "answer", [(1, 2)], []),
    (STATE, msgspec.structs.replace(STATE, free=[1, 2]), "free", [2, 1], [1, 2]),
    (STATE, msgspec.structs.replace(STATE, refs={}), "refs.3", 1, "absent"),
    (STATE, msgspec.structs.replace(STATE, rows={"r1": [[3], [4]]}), "rows.r1[1]", [0, 4], [4]),
    (STATE, msgspec.structs.replace(STATE, cached={"3": (0, 2, "00ff")}), "cached.3", [0, 4, "00ff"], [0, 2, "00ff"]),
    (Failure("no"), Reset(True), "error", "no", "no error"),
]


@pytest.mark.parametrize(("want", "got", "field", "wanted", "found"), DIFFERENT)
def test_first_difference_is_named(want: Any, got: Any, field: str, wanted: Any, found: Any) -> None:
    mismatch = compare(want, got)
    assert mismatch is not None
    assert dataclasses.astuple(mismatch) == (field, wanted, found)


@pytest.mark.parametrize(
    ("file", "place"),
    [("/opt/site-packages/vllm/v1/utils.py", "vllm/v1/utils.py"), ("/home/me/engine.py", "/home/me/engine.py")],
)
def test_a_failure_names_its_place_alike_on_every_machine(file: str, place: str) -> None:
    with pytest.raises(IndexError) as raised:
        exec(compile("\n[][0]", file, "exec"))
    assert failure_of(raised.value).message == f"IndexError: list index out of range at {place}:2"


def test_two_failures_agree() -> None:
    assert compare(Failure("assertion"), Failure("refused")) is None


def test_stored_events_are_ordered() -> None:
    mismatch = compare([STORED, OTHER], [OTHER, STORED])
    assert mismatch is not None
    assert mismatch.field == "stored[0].group"
    mismatch = compare([STORED, OTHER], [STORED])
    assert mismatch is not None
    assert mismatch.field == "number of stored events"


def test_removed_events_are_a_multiset() -> None:
    assert compare([STORED, *REMOVED], [REMOVED[1], STORED, REMOVED[0]]) is None
    mismatch = compare(REMOVED, [REMOVED[0], REMOVED[0]])
    assert mismatch is not None
    assert (mismatch.field, mismatch.want, mismatch.got) == ("removed", [(0, 1, ("bb",))], [(0, 1, ("aa",))])
    assert compare(REMOVED, []) is not None
    assert compare([], REMOVED) is not None


def test_keys_are_compared_where_wanted() -> None:
    bare = msgspec.structs.replace(STORED, keys=None, parent=None)
    assert compare([bare], [STORED]) is None
    assert compare([STORED], [bare]) is not None
    assert compare([STORED], [msgspec.structs.replace(STORED, parent="cc")]) is not None
    assert compare([msgspec.structs.replace(REMOVED[0], keys=None)], [REMOVED[0]]) is None


def test_version_1_knows_no_cleared_event() -> None:
    cleared = CacheEvent(type="cleared")
    assert compare([], [cleared], version=1) is None
    assert compare([], [cleared], version=2) is not None


# Agreement up to the names of blocks.


class Renamed(NumpyEngine):
    """The reference with its blocks numbered backwards."""

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self._last = header.num_blocks

    def _name(self, block: int) -> int:
        return block and self._last - block

    def _rows(self, rows: list[list[int]]) -> list[list[int]]:
        return [[self._name(block) for block in row] for row in rows]

    def lookup(self, id: str, limit: int | None = None) -> Hit:
        found = super().lookup(id, limit)
        return Hit(found.hit, self._rows(found.blocks), found.shared_prefix)

    def connector_lookup(self, id: str, limit: int | None = None) -> ConnectorHit:
        found = super().connector_lookup(id, limit)
        return msgspec.structs.replace(found, blocks=self._rows(found.blocks))

    def truncate(self, rows: list[list[int]], tokens: int) -> list[list[int]]:
        return self._rows(super().truncate(self._rows(rows), tokens))

    def hold(self, blocks: Sequence[int]) -> None:
        super().hold([self._name(block) for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        super().release([self._name(block) for block in blocks])

    def zeros(self) -> list[int]:
        return [self._name(block) for block in super().zeros()]

    def finalize(self, id: str, in_flight: int) -> list[Offer]:
        return [(group, self._name(block), tokens) for group, block, tokens in super().finalize(id, in_flight)]

    def offloads(self) -> dict[str, list[Offer]]:
        offers = super().offloads().items()
        return {id: [(group, self._name(block), tokens) for group, block, tokens in each] for id, each in offers}

    def allocate(self, operation: AllocateOp) -> Allocation:
        if operation.rows is not None:
            operation = msgspec.structs.replace(operation, rows=self._rows(operation.rows))
        blocks = super().allocate(operation).blocks
        return Allocation(None if blocks is None else self._rows(blocks))

    def evict(self, blocks: Sequence[int]) -> None:
        super().evict([self._name(block) for block in blocks])

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        return [(self._name(source), self._name(target)) for source, target in super().copies(hold)]

    def state(self) -> CacheState:
        state = super().state()
        return CacheState(
            free=[self._name(block) for block in state.free],
            refs={str(self._name(int(block))): count for block, count in state.refs.items()},
            rows={id: self._rows(rows) for id, rows in state.rows.items()},
            cached={str(self._name(int(block))): entry for block, entry in state.cached.items()},
        )


class LastFreeFirst(Renamed):
    """Not a renaming: it turns the free queue's order round where it tells of it."""

    def state(self) -> CacheState:
        state = super().state()
        return msgspec.structs.replace(state, free=state.free[::-1])


class Swapping(Renamed):
    """Not a renaming: it says of a hit's first two blocks that they stand the other way round."""

    def lookup(self, id: str, limit: int | None = None) -> Hit:
        found = super().lookup(id, limit)
        rows = [[row[1], row[0], *row[2:]] if len(row) > 1 else row for row in found.blocks]
        return Hit(found.hit, rows, found.shared_prefix)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_renaming_is_one(feature: str) -> None:
    for seed in range(6):
        _, parted = differ(Renamed, NumpyEngine, feature, seed, 1 + seed % 4, 12, ids="isomorphic")
        assert parted is None, parted
        _, parted = differ(Renamed, NumpyEngine, feature, seed, 1 + seed % 4, 12)
        assert parted is not None


@pytest.mark.parametrize(("engine", "field"), [(LastFreeFirst, "free"), (Swapping, "blocks")])
def test_what_is_none_is_found(engine: type, field: str) -> None:
    found = []
    for seed in range(20):
        _, parted = differ(engine, NumpyEngine, "core", seed, 1, 12, ids="isomorphic")
        if parted is not None:
            found.append(parted.field)
    assert any(name.startswith(field) for name in found)

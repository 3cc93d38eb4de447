"""Agreement up to the names of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, CacheState, ConnectorHit, Header, Hit, Offer
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.oracle.record import differ


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
        assert parted is None, parted.mismatch
        _, parted = differ(Renamed, NumpyEngine, feature, seed, 1 + seed % 4, 12)
        assert parted is not None


@pytest.mark.parametrize(("engine", "field"), [(LastFreeFirst, "free"), (Swapping, "blocks")])
def test_what_is_none_is_found(engine: type, field: str) -> None:
    found = []
    for seed in range(20):
        _, parted = differ(engine, NumpyEngine, "core", seed, 1, 12, ids="isomorphic")
        if parted is not None:
            found.append(parted.mismatch.field)
    assert any(name.startswith(field) for name in found)


@pytest.mark.parametrize("feature", FEATURES)
def test_an_engine_is_isomorphic_to_itself(feature: str) -> None:
    for seed in range(4):
        assert differ(NumpyEngine, NumpyEngine, feature, seed, 2, 12, ids="isomorphic")[1] is None

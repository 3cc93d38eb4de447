"""The reference and the compiled cache in step, forks included, which logs do not know: compared after every operation.

Both are asked through one class; what differs is an `AssertionError`, so a test says only what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.jax_reading import Reader
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import AllocateOp, Rows
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Batch, Code, Column
from hkv.errors import HKVError
from hkv.keys.chained import Interner
from hkv.state.state import Counter
from hkv.state.status import Status
from reference.dialects.vllm.fork import fork
from tests.cache.build import run, start
from tests.reference.build import PLAIN

REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may be refused without anything being wrong."""


class Pair:
    """A cache of keyed requests in both forms; its configuration fits `tests.cache.build.BUCKETS`."""

    def __init__(self, settings: VllmConfig) -> None:
        self.reference = NumpyEngine(to_header(settings, "partial", 3 if settings.encoder_tokens else 2))
        self.groups = len(settings.topology.groups)
        self.parameters, self.state = start(settings)
        self.slots: dict[str, int] = {}
        self.keys: dict[str, Sequence[int]] = {}
        self._interner = Interner()
        self._reader = Reader(settings, self.parameters, self._interner)
        self._size = settings.hash_block_size

    def request(self, id: str, tokens: int, keys: Sequence[int]) -> None:
        """A request arrives whose prefixes are called `keys`, now and later."""
        self.slots[id] = next(slot for slot in range(8) if slot not in self.slots.values())
        self.keys[id] = keys
        self.reference.request_keyed(id, tokens, keys)
        numbers = self._interner.numbers(keys)[: tokens // self._size]
        self._perform(Code.REQUEST, id, numbers, tokens=tokens)

    def extend(self, id: str, tokens: int) -> None:
        """Generated tokens are appended."""
        before = self.reference.manager.requests[id].num_tokens
        self.reference.extend(id, tokens)
        numbers = self._interner.numbers(self.keys[id])
        new = numbers[before // self._size : (before + tokens) // self._size]
        self._perform(Code.APPEND, id, new, tokens=tokens)

    def lookup(self, id: str) -> int:
        """The hit of a waiting request."""
        want = self.reference.lookup(id)
        row, ids = self._perform(Code.LOOKUP, id)
        assert (int(row[Column.VALUE]), int(row[Column.SHARED_PREFIX])) == (want.hit, want.shared_prefix)
        if want.hit:
            assert self._rows(row, ids, leading=True) == want.blocks
        return want.hit

    def allocate(self, id: str, new: int, hit: int = 0, **fields: Any) -> bool:
        """Allocates blocks for a request's next tokens; True if both grant them."""
        operation = AllocateOp(id=id, new=new, hit=hit, **{**PLAIN, **fields})
        want = self.reference.allocate(operation)
        arguments = {"tokens" if name == "encoder" else name: int(value) for name, value in fields.items()}
        row, _ = self._perform(Code.ALLOCATE, id, new=new, hit=hit, shared_prefix=-1, allowed=REFUSALS, **arguments)
        assert (row[Column.STATUS] == Status.OK) == (want.blocks is not None)
        return want.blocks is not None

    def advance(self, id: str, tokens: int) -> None:
        """More tokens are computed."""
        self._tell(Code.ADVANCE, id, lambda: self.reference.advance(id, tokens), tokens=tokens)

    def commit(self, id: str, tokens: int) -> None:
        """The first tokens may be registered."""
        self._tell(Code.COMMIT, id, lambda: self.reference.commit(id, tokens), tokens=tokens)

    def retire(self, id: str, processed: int) -> None:
        """The blocks are given back that the query at `processed` cannot read."""
        for kind in self.reference.manager.cache.kinds:
            kind.retire(id, processed)
        self._perform(Code.RETIRE, id, tokens=processed)

    def free(self, id: str) -> None:
        """The request is preempted, or ends."""
        self._tell(Code.FREE, id, lambda: self.reference.free(id))

    def drop(self, id: str) -> None:
        """A waiting request is forgotten."""
        self._tell(Code.DROP, id, lambda: self.reference.drop(id))
        del self.slots[id]

    def evict(self, blocks: Sequence[int]) -> None:
        """Blocks lose their keys."""
        self.reference.evict(blocks)
        self._perform(Code.EVICT, None, blocks)

    def step(self) -> None:
        """A scheduling step begins, once the copies of the one before are made."""
        copies = self.reference.copies()
        if copies:
            self._perform(Code.COPIES, None, [block for copy in copies for block in copy])
        self.reference.step()
        self._perform(Code.STEP, None)

    def fork(self, parent: str, child: str) -> list[list[tuple[int, int]]] | None:
        """Starts `child` from `parent`; returns the copies of each group, or None where it is refused."""
        slot = next(slot for slot in range(8) if slot not in self.slots.values())
        want = fork(self.reference.manager, parent, child)
        if want is not None:
            self.slots[child], self.keys[child] = slot, self.keys[parent]
        refusals = (Status.NO_ROOM, Status.BLOCK_MISSING)
        row, ids = self._perform(Code.FORK, parent, tokens=slot, allowed=refusals)
        got = None
        if row[Column.STATUS] == Status.OK:
            left = iter(ids[row[Column.IDS] :].tolist())
            ends = row[RESULT_FRONT:].reshape(-1, 2)[: self.groups]
            got = [[(next(left), next(left)) for _ in range(first, end)] for first, end in ends]
        assert got == want
        return want

    def _tell(self, code: Code, id: str, ask: Callable[[], None], **arguments: int) -> None:
        """Performs one operation on both; both do it, or both refuse."""
        try:
            ask()
        except HKVError:
            row, _ = self._perform(code, id, allowed=tuple(Status), **arguments)
            assert row[Column.STATUS] != Status.OK, f"{code.name} of {id} should be refused"
            raise
        self._perform(code, id, **arguments)

    def _perform(
        self, code: Code, id: str | None, payload: Sequence[int] = (), allowed: Sequence[Status] = (), **arguments: int
    ) -> tuple[np.ndarray, np.ndarray]:
        batch = Batch().add(code, 0 if id is None else self.slots[id], payload, **arguments)
        self.state, results = run(self.parameters, self.state, batch)
        assert results.table[0, Column.STATUS] in (Status.OK, *allowed), Status(int(results.table[0, Column.STATUS]))
        state = jax.device_get(self.state)
        assert self._reader.state(state, self.slots) == self.reference.state()
        assert int(state.counters[Counter.FREE]) == self.reference.num_free()
        assert int(state.counters[Counter.EVICTIONS]) == self.reference.evictions
        return results.table[0], results.ids

    def _rows(self, row: np.ndarray, ids: np.ndarray, leading: bool) -> Rows:
        place, rows = int(row[Column.IDS]) + 3 * int(row[Column.COPIES]), []
        for group in range(self.groups):
            first, end = (int(row[RESULT_FRONT + 2 * group + side]) for side in (0, 1))
            rows.append([0] * (first if leading else 0) + ids[place : place + end - first].tolist())
            place += end - first
        return rows

"""Operations under RTP-LLM's rules as a batch for the lowered text, and notes of those that the text performs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import ARGUMENTS, RtpNumpyEngine
from hkv.dialects.rtp_llm.plain import LAYOUT, empty_arrays
from hkv.lowering import State
from reference.dialects.rtp_llm.records import Code

FIELDS = ("code", "slot", *ARGUMENTS)
"""Fields of an operation."""


class Batch:
    """Operations in order. A key is a number from 0 on."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.payload: list[int] = []
        self.numbers: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(
        self, code: Code, slot: int = 0, keys: Sequence[int] = (), numbers: Sequence[int] = (), **given: int
    ) -> Self:
        """Adds an operation with keys or numbers; further fields are 0 unless given."""
        count = max(len(keys), len(numbers))
        self.rows.append({"code": code, "slot": slot, "count": count, "start": len(self.payload), **given})
        self.payload += [key + 2 for key in keys] + [2] * (count - len(keys))
        self.numbers += [*numbers, *[0] * (count - len(numbers))]
        return self

    def into(self, state: State) -> State:
        """A state with room for them, with these as the operations that are to be performed."""
        arrays: dict[str, Any] = {f"operations.{name}": np.zeros_like(state[f"operations.{name}"]) for name in FIELDS}
        for name in FIELDS:
            arrays[f"operations.{name}"][1 : len(self) + 1] = [row.get(name, 0) for row in self.rows]
        for name, values in (("payload", self.payload), ("numbers", self.numbers)):
            arrays[name] = np.zeros_like(state[name])
            arrays[name][: len(values)] = values
        return {**state, **arrays}

    def begun(self, config: RtpConfig, **sizes: int) -> State:
        """An empty cache of such sizes with these operations, configuration and all."""
        return self.into(empty_arrays(config, **sizes, operations=len(self), payload=len(self.payload) + 1))


class Noted(RtpNumpyEngine):
    """The text, with a note of each operation, to be performed again with the others at once."""

    def __init__(self, header: Any) -> None:
        super().__init__(header)
        self.batch = Batch()

    def _do(self, code: Code, id: str | None, **given: Any) -> Any:
        fields = {name: int(value) for name, value in given.items() if name in ARGUMENTS}
        keys = [self._number(key) for key in given.get("keys", ())]
        slot = 0 if id is None else self.requests[id].slot
        self.batch.add(code, slot, keys, given.get("numbers", ()), **fields)
        return super()._do(code, id, **given)

    def begun(self) -> State:
        """An empty cache with all operations that were noted."""
        config, count = self.cache.config, len(self.batch)
        sizes = {"keys": len(self.cache.keys), "slots": config.slots, "batch": config.batch, "row": config.row}
        return self.batch.begun(self.config, **sizes, told=40 * count)


def differing(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """Names of arrays and scalars that are not equal, but for elements that stand for None, or for writes that must not
    happen."""
    firsts: dict[str, Sequence[int]] = {
        flat.table: want[flat.name] for flat in LAYOUT.arrays.values() if flat.table and not flat.line
    }
    found = []
    for name, array in got.items():
        flat, other = LAYOUT.arrays.get(name), want[name]
        if flat is not None:
            first = len(other) // len(firsts[flat.table]) if flat.table else 0
            array, other = (each[first:] if flat.table else each[:-1] for each in (array, other))
        if (array != other).any():
            found.append(name)
    return found

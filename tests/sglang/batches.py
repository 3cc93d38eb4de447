"""Operations under SGLang's rules as a batch: noted while the text performs them, to be performed again at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hkv.dialects.sglang.batches import Batch, empty_state
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.dialects.sglang.plain import LAYOUT
from reference.dialects.sglang.records import Code, Status


class Noted(SGLangNumpyEngine):
    """The text, with a note of each operation and of its keys."""

    def __init__(self, header: Any) -> None:
        super().__init__(header)
        self.batch = Batch()

    def _do(
        self, code: Code, id: str | None, keys: Sequence[int] = (), refused: Status = Status.OK, **given: int
    ) -> Any:
        self.batch.add(code, 0 if id is None else self._host(id).slot, keys, **given)
        return super()._do(code, id, keys, refused, **given)

    def state(self) -> dict[str, Any]:
        """An empty cache with all operations that were noted, to be performed at once, configuration and all."""
        sizes = {"keys": len(self._pages) + 1, "requests": self.cache.slots, "row": self.cache.row}
        room = {"operations": len(self.batch), "payload": len(self.batch.keys)}
        return self.batch.into(empty_state(self.config, known=False, **sizes, **room))


def differing(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """Names of arrays and scalars that are not equal, but for elements that stand for None, or for writes that must not
    happen."""
    found = []
    for name, array in got.items():
        flat = LAYOUT.arrays.get(name)
        other = want[name]
        if flat is not None:
            first = len(other) // _records(want, flat.table) if flat.table else 0
            array, other = (each[first:] if flat.table else each[:-1] for each in (array, other))
        if (array != other).any():
            found.append(name)
    return found


def _records(arrays: Mapping[str, Any], table: str) -> int:
    """Records of a table, None among them."""
    return len(arrays[next(flat.name for flat in LAYOUT.arrays.values() if flat.table == table and not flat.line)])

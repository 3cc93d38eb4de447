"""Operations under vLLM's rules as a batch: noted while the text performs them, to be performed again at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hkv.dialects.vllm.engines.keyed import BLANK
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.plain import LAYOUT, empty, settings
from reference.dialects.vllm.records import Cache, Code, Status

ROOM = {
    **{"groups": 7, "blocks": 400, "entries": 12_000, "rows": 280, "requests": 40, "operations": 900, "results": 900},
    **{"news": 12_000, "offers": 300, "copies": 400, "order": 7, "payload": 6_000, "ids": 20_000},
    **dict.fromkeys(("requests.chain", "rows.blocks", "rows.stands"), 500),
    **dict.fromkeys(("requests.rows", "results.own", "results.first", "results.end", "operations.loaded"), 8),
    **dict.fromkeys(("blocks.known", "blocks.later", "blocks.sooner"), 16),
}
"""Sizes of batches that one program serves."""


class Noted(PlainEngine):
    """The text, with a note of each operation and of its payload."""

    def __init__(self, header: Any) -> None:
        super().__init__(header)
        self.noted: list[tuple[dict[str, int], list[int]]] = []
        self.payload: list[int] = []

    def _do(
        self, code: Code, id: str | None = None, payload: Sequence[int] = (), refused: Status = Status.OK, **given: Any
    ) -> Any:
        slot = 0 if id is None else self._host(id).slot
        fields = {**BLANK, "code": code, "slot": slot, "count": len(payload), "start": len(self.payload), **given}
        loaded = self.cache.operations[1].loaded[1 : len(self._groups) + 1]
        self.noted.append(({name: int(value) for name, value in fields.items()}, list(loaded)))
        self.payload += payload
        return super()._do(code, id, payload, refused, **given)

    def batch(self, least: Mapping[str, int], **told: bool) -> Cache:
        """An empty cache with all operations that were noted, to be performed at once."""
        needs = {"operations": len(self.noted), "results": len(self.noted), "payload": len(self.payload)}
        needs |= {"ids": len(self.noted) * 40, "news": len(self.noted) * 40, "offers": 400, **least}
        sizes: dict[str, Any] = {"keys": len(self._keys) + 1, "requests": self.cache.slots, "tokens": self._tokens}
        cache = empty(self.config, **sizes, least=needs, **told)
        for operation, (fields, loaded) in zip(cache.operations[1:], self.noted, strict=False):
            for name, value in fields.items():
                setattr(operation, name, value)
            operation.loaded[1 : len(loaded) + 1] = loaded
        cache.payload[: len(self.payload)] = self.payload
        return cache

    def static(self, **told: bool) -> dict[str, int]:
        """The configuration, known while a program is made."""
        return settings(self.config, **told)


def differing(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """Names of arrays and scalars that are not equal, but for elements that stand for None, or for writes that must not
    happen."""
    found = []
    for name, array in got.items():
        flat, other = LAYOUT.arrays.get(name), want[name]
        if flat is not None and flat.table:
            first = len(other) // _records(want, flat.table)
            array, other = array[first:], other[first:]
        elif flat is not None:
            array, other = array[:-1], other[:-1]
        if (array != other).any():
            found.append(name)
    return found


def _records(arrays: Mapping[str, Any], table: str) -> int:
    """Records of a table, None among them."""
    return len(next(arrays[name] for name, flat in LAYOUT.arrays.items() if flat.table == table and not flat.line))

"""A cache of the text's whose keys are made of tokens: what the whole cache and its tree alone share."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.engines.pages import Namespace, Pages
from hkv.dialects.sglang.plain import LAYOUT, Reader, empty
from reference.dialects.sglang.radix import match
from reference.dialects.sglang.records import Cache, Request


class Keyed:
    """A cache whose keys are made of tokens, and that grows with them.

    Attributes:
      header: the configuration, as a log's first line. config: the same.
      cache: the text's objects.
    """

    room = MappingProxyType({"keys": 16, "requests": 4, "row": 8})
    """Room that a cache begins with, as `hkv.dialects.sglang.plain.empty` takes it; it grows."""

    def __init__(self, header: structs.Header) -> None:
        self.header, self.config = header, structs.to_config(header)
        self.cache: Cache = empty(self.config, **self.room, alone=header.tree)
        self._pages = Pages(self.config.page_size, bigrams=self.config.bigrams)
        self.reader = Reader(self.config, self._pages)

    def __getstate__(self) -> dict[str, Any]:
        """Copies are made of numbers: records refer to each other as deep as rows are long."""
        return {**vars(self), "cache": LAYOUT.numbers_of(self.cache)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, cache=LAYOUT.restored(state["cache"]))

    def keys(self, tokens: Sequence[int], namespace: Namespace) -> list[int]:
        """Numbers of the keys of whole pages, for which there is room then."""
        numbers = [number + 1 for number in self._pages.of(tokens, namespace)]
        if (lacking := len(self._pages) + 1 - len(self.cache.keys)) > 0:
            LAYOUT.grow(self.cache, "keys", max(lacking, len(self.cache.keys)))
        if (lacking := len(tokens) // self.config.page_size + 2 - self.cache.row) > 0:
            self._lengthen(max(lacking, self.cache.row))
        return numbers

    def note(self, request: Request, keys: Sequence[int]) -> None:
        """Puts keys into a request's chain."""
        request.chain[: len(keys)] = [self.cache.keys[key] for key in keys]

    def alone(self, tokens: Sequence[int], namespace: Namespace, name: str) -> int:
        """Tokens at which one component alone, and full attention, could resume; nothing is changed."""
        keys = self.keys(tokens, namespace)
        cache = LAYOUT.restored(LAYOUT.numbers_of(self.cache))
        cache.config.window = cache.config.window if name == "SWA" else 0
        cache.config.states = cache.config.states if name == "MAMBA" else 0
        cache.requests[1].chain[: len(keys)] = [cache.keys[key] for key in keys]
        return match(cache, cache.requests[1], len(keys))[1] * self.config.page_size

    def _lengthen(self, pages: int) -> None:
        LAYOUT.lengthen(self.cache, "requests", pages)
        self.cache.payload += [None] * pages  # type: ignore[list-item]
        self.cache.row += pages

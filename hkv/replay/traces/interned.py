"""A trace whose prefixes are interned once for every size of block, however often it is replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hkv.replay.traces.prefix_keys import PrefixKeys, keys_of_ids
from hkv.replay.traces.reader import TraceRequest, granularity
from hkv.replay.traces.sharing import shared_prefixes


@dataclasses.dataclass(frozen=True)
class Interned:
    """Prefix keys of a trace's requests, one request's after the other's.

    Attributes:
      keys: int32[m]; a request that is too long has none.
      ends: int64[n + 1], where each request's keys begin, and where the last ones end.
    """

    keys: np.ndarray
    ends: np.ndarray

    def of(self, index: int) -> np.ndarray:
        """The keys of one request, int32."""
        return self.keys[self.ends[index] : self.ends[index + 1]]


class InternedTrace:
    """Requests of a trace, with what every replay of them needs to know, found when it is first asked for.

    Args:
      requests: in order of arrival.

    Attributes:
      requests: the same.
      arrivals: lists of arrivals that replays of it made, by what these depend on.
      granularity: tokens of the finest part that the trace names, as `hkv.replay.traces.reader.granularity`.
    """

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self.requests: Sequence[TraceRequest] = list(requests)
        self.granularity = granularity(self.requests)
        self.arrivals: dict[Any, Any] = {}
        self._keys: dict[tuple[int, int], Interned] = {}
        self._shared: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def keys(self, block: int, max_model_len: int) -> Interned:
        """Prefix keys, one for every `block` tokens of prompt and output.

        Args:
          block: tokens between two keys.
          max_model_len: most tokens of a request that is served.
        """
        asked = block, max_model_len
        if asked not in self._keys:
            self._keys[asked] = self._interned(block, max_model_len)
        return self._keys[asked]

    def shared(self, max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that earlier requests had too, as `hkv.replay.traces.sharing.shared_prefixes` finds them."""
        if max_model_len not in self._shared:
            self._shared[max_model_len] = shared_prefixes(self.requests, max_model_len)
        return self._shared[max_model_len]

    def _interned(self, block: int, max_model_len: int) -> Interned:
        served = [each.input_length + each.output_length <= max_model_len for each in self.requests]
        per_id = max(1, self.granularity)
        if all(each.tokens is None for each in self.requests):
            return Interned(*keys_of_ids(self.requests, served, block, per_id))
        keys, none = PrefixKeys(block, per_id), np.zeros(0, np.int64)
        parts = [keys.of(each) if there else none for each, there in zip(self.requests, served, strict=True)]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return Interned(np.concatenate([none, *parts]).astype(np.int32), ends)

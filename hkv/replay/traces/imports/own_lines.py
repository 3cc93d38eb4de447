"""Imported requests as lines of HKV's own format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hkv.replay.traces.imports.imported import Imported
from hkv.replay.traces.workloads import PrefixIds


def own_lines(requests: Iterable[Imported], tokens_per_id: int | None, synthetic: str = "") -> Iterator[dict[str, Any]]:
    """One JSON object a request, as `hkv.replay.traces.reader.read_trace` reads it, with the ids' granularity.

    Ids of a source are given anew, 0, 1, 2, ..., by what stands before them: whether they named blocks or whole
    prefixes, equal ones then mean equal prefixes. Where requests have tokens, ids are written in their stead,
    unless `tokens_per_id` is None.
    """
    chains = _Chains()
    prefixes = PrefixIds(tokens_per_id or 1)
    for request in requests:
        line: dict[str, Any] = {"timestamp": _plain(request.timestamp or 0.0)}
        if request.tokens is not None and tokens_per_id is None:
            line["tokens"] = list(request.tokens)
            if request.output_tokens is None:
                line["output_length"] = request.output_length
            else:
                line["output_tokens"] = list(request.output_tokens)
        else:
            ids = None
            if request.tokens is not None:
                ids = prefixes.of(np.asarray(request.tokens, np.uint32))
            elif request.ids is not None:
                ids = chains.of(request.ids)
            line |= {"input_length": request.input_length, "output_length": request.output_length, "hash_ids": ids}
            if ids is not None:
                line["tokens_per_id"] = tokens_per_id
        if synthetic:
            line["synthetic"] = synthetic
        yield line


def _plain(milliseconds: float) -> int | float:
    """Milliseconds, to a thousandth: seconds times 1,000 are not exact."""
    rounded = round(milliseconds, 3)
    return int(rounded) if rounded == int(rounded) else rounded


class _Chains:
    """Ids of prefixes, given in the order in which they are met."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def of(self, blocks: Iterable[int]) -> list[int]:
        parent, ids = -1, []
        for block in blocks:
            parent = self._ids.setdefault((parent, block), len(self._ids))
            ids.append(parent)
        return ids

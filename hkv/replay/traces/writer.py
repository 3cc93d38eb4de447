"""Writes generated requests as trace lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hkv.errors import ConfigError
from hkv.replay.traces.workloads import GeneratedRequest

FORMATS = ("mooncake", "tokens")


def trace_lines(requests: Iterable[GeneratedRequest], format: str, tokens_per_id: int) -> Iterator[dict[str, Any]]:
    """One JSON object a request, as `hkv.replay.traces.reader.read_trace` reads it.

    Args:
      requests: in order of arrival.
      format: `mooncake` (lengths and one id for every `tokens_per_id` prompt tokens, the last one for what is left) or
        `tokens` (all tokens, generated ones too).
      tokens_per_id: tokens that one id stands for.

    Raises:
      ConfigError: no such format.
    """
    if format not in FORMATS:
        raise ConfigError("format", format, f"one of {', '.join(FORMATS)}")
    ids = PrefixIds(tokens_per_id)
    for request in requests:
        if format == "tokens":
            rest: dict[str, Any] = {"tokens": request.tokens.tolist(), "output_tokens": request.output.tolist()}
        else:
            lengths = {"input_length": len(request.tokens), "output_length": len(request.output)}
            rest = {**lengths, "hash_ids": ids.of(request.tokens), "tokens_per_id": tokens_per_id}
        yield {"timestamp": request.timestamp, **rest}


class PrefixIds:
    """Equal ids, equal blocks and equal prefixes; ids are 0, 1, 2, ... in the order in which they are met."""

    def __init__(self, tokens_per_id: int) -> None:
        self._size = 4 * tokens_per_id
        self._ids: dict[tuple[int, bytes], int] = {}

    def of(self, tokens: np.ndarray) -> list[int]:
        data = tokens.astype("<u4").tobytes()
        ids: list[int] = []
        for start in range(0, len(data), self._size):
            block = (ids[-1] if ids else -1, data[start : start + self._size])
            ids.append(self._ids.setdefault(block, len(self._ids)))
        return ids

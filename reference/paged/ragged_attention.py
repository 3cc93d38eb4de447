"""Attention over block tables as its definition: every query, every head, every position, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hkv.layout.block_layout import Layout
from reference.paged.operations import gather


def sees(
    query: int, position: int, *, window: int | None = None, chunk: int | None = None, sink_tokens: int = 0
) -> bool:
    """True if the query at one position sees the token at another."""
    if position > query:
        return False
    if position < sink_tokens:
        return True
    if window is not None and query - position >= window:
        return False
    return chunk is None or query // chunk == position // chunk


def attention(
    pool: np.ndarray,
    layout: Layout,
    layer: int,
    query: np.ndarray,
    table: Sequence[Sequence[int]],
    cu_q_lens: Sequence[int],
    kv_lens: Sequence[int],
    dtypes: Mapping[str, np.dtype],
    *,
    window: int | None = None,
    chunk: int | None = None,
    sink_tokens: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    value_size: int | None = None,
    null_block: int = 0,
) -> np.ndarray:
    """Twin of `hkv.paged.attention`, float64 `[tokens, query heads, value elements]`; `dtypes` of all parts."""
    scale = query.shape[2] ** -0.5 if scale is None else scale
    result: np.ndarray | None = None
    for row, length in enumerate(kv_lens):
        keys, values = _contents(pool, layout, layer, table[row], dtypes, null_block)
        keys, values = keys * key_scale, values * value_scale
        values = values[..., :value_size]
        if result is None:
            result = np.zeros((*query.shape[:2], values.shape[-1]))
        first, end = cu_q_lens[row], cu_q_lens[row + 1]
        shared = query.shape[1] // keys.shape[1]
        for token in range(first, end):
            position = length - (end - token)
            seen = [
                other
                for other in range(position + 1)
                if sees(position, other, window=window, chunk=chunk, sink_tokens=sink_tokens)
            ]
            for head in range(query.shape[1]):
                scores = keys[seen, head // shared] @ query[token, head].astype(np.float64) * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                extra = [] if sinks is None else [float(sinks[head])]
                weights = _softmax(np.concatenate([scores, extra]))[: len(seen)]
                result[token, head] = weights @ values[seen, head // shared]
    assert result is not None, "at least one row"
    return result


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _contents(
    pool: np.ndarray, layout: Layout, layer: int, row: Sequence[int], dtypes: Mapping[str, np.dtype], null_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a row, float64 `[states, heads, elements]`."""
    found, _ = gather(pool, layout, layer, [int(block) for block in row], dtypes, null_block)

    def numbers(name: str) -> np.ndarray:
        content = found[name].astype(np.float64)
        if f"{name}_scale" in found:
            scales = found[f"{name}_scale"].astype(np.float64)
            content = content * np.repeat(scales, content.shape[-1] // scales.shape[-1], axis=-1)
        return content

    if "latent" not in found:
        return numbers("key"), numbers("value")
    keys = [numbers(name) for name in ("latent", "rope") if name in found]
    return np.concatenate(keys, axis=-1), numbers("latent")

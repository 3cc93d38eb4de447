"""Transfers of a compiled second tier, one after the other in each direction: the twin of `tier.Link`.

A moment is a step and bytes of it, which need two words: no replay has 64-bit integers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.rules.offload.parameters import TierNumber, TierView
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.state.loops import Scalar, read

WORD = 1 << 20
"""Bytes that the lower word counts."""


def transferred(w: Any, tier: TierView, kind: str, start: Scalar, count: Scalar, enabled: Scalar) -> tuple[Any, Scalar]:
    """The step at whose end a transfer of `count` chunks is done that may begin with step `start`."""
    names = [f"{kind}_{part}" for part in ("step", "high", "low")]
    step, high, low = (getattr(w, name) for name in names)
    late = step < start
    step, high, low = jnp.where(late, start, step), jnp.where(late, 0, high), jnp.where(late, 0, low)
    place = 3 * jnp.where(enabled, count, 0)
    steps, more_high, more_low = (read(tier.moved, place + part) for part in range(3))
    low = low + more_low
    high = high + more_high + (low >= WORD)
    low = jnp.where(low >= WORD, low - WORD, low)
    rate_high, rate_low = tier.rate[0], tier.rate[1]
    full = (high > rate_high) | ((high == rate_high) & (low >= rate_low))
    low = low - jnp.where(full, rate_low, 0)
    high = high - jnp.where(full, rate_high, 0) - (low < 0)
    low = jnp.where(low < 0, low + WORD, low)
    step = step + steps + full
    limited = enabled & (tier.number(TierNumber.LIMITED) != 0)
    now = (jnp.where(limited, new, getattr(w, name)) for name, new in zip(names, (step, high, low), strict=True))
    w = w.replace(**dict(zip(names, now, strict=True)))
    end = jnp.maximum(start, step + ((high > 0) | (low > 0)) - 1)
    return w, jnp.where(limited, end, start)


def tables(most: int, tier: Tier) -> tuple[np.ndarray, np.ndarray]:
    """`TierView.moved`, for up to `most` chunks, and `TierView.rate`."""
    if not tier.step_bytes:
        return np.zeros(3 * (most + 1), np.int32), np.array([0, 1], np.int32)
    found = []
    for count in range(most + 1):
        steps, rest = divmod(tier.moved(count, bool(count)), tier.step_bytes)
        found += [steps, *divmod(rest, WORD)]
    return np.array(found, np.int32), np.array(divmod(tier.step_bytes, WORD), np.int32)


def beaten(most: int, tier: Tier) -> np.ndarray:
    """`TierView.beaten`: of up to `most` chunks, the most tokens that take less long to compute than they to load."""
    found = np.zeros(most + 1, np.int32)
    if tier.step_bytes and (step_tokens := tier.step_tokens):
        for count in range(most + 1):
            load = tier.moved(count, bool(count)) / tier.step_bytes
            tokens = int(load * step_tokens) + 2
            while tokens > 0 and not load > tokens / step_tokens:
                tokens -= 1
            found[count] = min(tokens, np.iinfo(np.int32).max)
    return found

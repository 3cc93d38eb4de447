"""Difference between the logits that were computed with a cache and those of the pass without one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from examples.hybrid_decoder.model import Model, Weights
from examples.hybrid_decoder.plain import without_cache
from examples.hybrid_decoder.serving import Request

ULPS = 256
"""Of the largest logit: what XLA's own sums may differ by in another order."""


def allowed(model: Model) -> float:
    """The most that `difference` may be: 0 if no bit depends on how many tokens are computed together."""
    return 0 if model.exact else ULPS


def difference(judge: Model, weights: list[Weights], request: Request) -> float:
    """The largest difference of a computed logit from the pass without a cache.

    Args:
      judge: the sizes, and the kinds, as they should be; blocks do not matter.
      weights: the model's.
      request: after it was served, with its logits.

    Returns:
      Units in the last place of the largest logit; 0 if no bit differs, and infinity for what is not a number.
    """
    tokens = np.zeros(judge.longest, np.int32)
    tokens[: len(request.tokens)] = request.tokens
    first, last = min(request.hits), len(request.tokens) - 1
    right = np.asarray(without_cache(judge, weights, jnp.asarray(tokens)))[first:last]
    assert request.logits is not None
    found = request.logits[first:last]
    if (found.view(np.uint32) == right.view(np.uint32)).all():
        return 0.0
    ulps = np.abs(found - right).max() / np.spacing(np.abs(right).max())
    return float(ulps) if np.isfinite(ulps) else np.inf

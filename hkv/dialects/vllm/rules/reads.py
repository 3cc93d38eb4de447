"""Tokens that a query does not read any more, in one form for all kinds of layers, by three numbers of the kind.

A query at `n` needs the tokens from `lookback` before the last multiple of `unit` on: a window has a `unit` of 1,
chunks one of their length and a `lookback` of 0, a recurrent state a `lookback` of 1, and full attention an unlimited
one. A kind that looks back further as the length grows halves what is left, `halvings` times: with one, a query reads
the latter half of what precedes it.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.config import UNLIMITED as UNLIMITED
from hkv.state.loops import Scalar, divide, remainder


def skipped_tokens(n: Scalar, unit: Scalar, lookback: Scalar, halvings: Scalar | int = 0) -> Scalar:
    """Leading tokens that the query at `n` does not need; elementwise. A `unit` of 0 counts as 1."""
    n = jnp.maximum(n, 0)
    # Arithmetic instead of a branch for each kind: kinds are data, and configurations of all kinds share a program.
    # A shift is the cheapest division there is, and by 0 none.
    return jnp.right_shift(jnp.maximum(n - remainder(n, jnp.maximum(unit, 1)) - lookback, 0), halvings)


def last_query(end: Scalar, unit: Scalar, lookback: Scalar, halvings: Scalar | int = 0) -> Scalar:
    """The last query that still needs all tokens from `end - 1` on: `skipped_tokens` is below `end` up to it."""
    unit = jnp.maximum(unit, 1)
    # So many tokens have to be skipped before the halvings; lengths that an int32 cannot hold are never reached.
    end = jnp.left_shift(jnp.minimum(end, jnp.right_shift(jnp.int32(UNLIMITED), halvings)), halvings)
    return divide(end + lookback - 1, unit) * unit + (unit - 1)

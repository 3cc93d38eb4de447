"""Experts of a mixture: every expert computes every token, as this is an example."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.serve.checkpoint import Weights
from examples.serve.layers import EXACT

best = jax.lax.top_k
"""`best(scores [tokens, experts], count)`: the scores of each token's best experts, and which they are."""


def shares(chosen: jax.Array, weights: jax.Array, experts: int) -> jax.Array:
    """Each expert's share of a token, `[tokens, experts]`, from the chosen ones and their shares."""
    empty = jnp.zeros((len(chosen), experts))
    return empty.at[jnp.arange(len(chosen))[:, None], chosen].set(weights)


def mixture(weights: Weights, x: jax.Array, share: jax.Array) -> jax.Array:
    """Sum of gated MLPs, `0.gate_proj.weight` and so on, by each token's shares `[tokens, experts]`."""

    def stacked(name: str) -> jax.Array:
        return jnp.stack([weights[f"{expert}.{name}.weight"] for expert in range(share.shape[1])])

    gate, up = (jnp.einsum("td,efd->tef", x, stacked(f"{name}_proj"), precision=EXACT) for name in ("gate", "up"))
    found = jnp.einsum("tef,edf->ted", jax.nn.silu(gate) * up, stacked("down_proj"), precision=EXACT)
    return jnp.einsum("te,ted->td", share, found, precision=EXACT)

"""The forward pass without a cache: all tokens of a sequence at once. The judge of everything else."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from examples.hybrid_decoder.layers import Parts, State, logits_of
from examples.hybrid_decoder.model import Model, Weights


class NoStore:
    """Nothing comes before the first token, and nothing is kept."""

    def __init__(self, model: Model, rows: int) -> None:
        self._model = model
        self._rows = rows

    def attention(self, layer: int, new: Parts) -> Parts:
        """The new tokens are all there are."""
        return new

    def by_kernel(self, layer: int, query: jax.Array, readers: jax.Array) -> None:
        """There are no pages."""

    def recurrence(self, layer: int) -> State:
        """Zeros."""
        model = self._model
        memory = (self._rows, model.delta_heads, model.delta_head, model.delta_head)
        return State(jnp.zeros((self._rows, model.taps - 1, model.channels)), jnp.zeros(memory))

    def keep(self, layer: int, states: State) -> None:
        """Nobody asks for them."""


@functools.partial(jax.jit, static_argnums=0)
def without_cache(model: Model, weights: list[Weights], tokens: jax.Array) -> jax.Array:
    """Logits [n, vocabulary] of a sequence int32[n]."""
    size = tokens.shape[0]
    store = NoStore(model, 1)
    return logits_of(model, weights, tokens[None], jnp.arange(size)[None], jnp.array([size]), store)[0]

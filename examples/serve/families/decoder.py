"""The loop over layers that families share: a mixer of tokens and a feed-forward each, both behind a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights
from examples.serve.layers import EXACT, Rotary, linear

Part = Callable[[int, Weights, jax.Array], jax.Array]
"""A part of a layer: `(layer, the layer's weights, x [tokens, hidden]) -> [tokens, hidden]`."""


def decoder(
    config: dict[str, Any],
    weights: Weights,
    x: jax.Array,
    mixer: Part,
    feed_forward: Part,
    norm: Callable[[jax.Array, jax.Array], jax.Array],
    names: tuple[str, str, str] = ("input_layernorm", "post_attention_layernorm", "norm"),
) -> jax.Array:
    """Logits of every token, float32 `[tokens, vocabulary]`.

    Args:
      config: the checkpoint's.
      weights: the checkpoint's.
      x: embeddings, `[tokens, hidden]`.
      mixer: attention or a recurrence.
      feed_forward: of each token alone.
      norm: of x by a weight.
      names: the norms before mixer, feed-forward and head.
    """
    model, (first, second, last) = weights.below("model."), names
    for layer in range(config["num_hidden_layers"]):
        own = model.below(f"layers.{layer}.")
        x = x + mixer(layer, own, norm(x, own[f"{first}.weight"]))
        x = x + feed_forward(layer, own, norm(x, own[f"{second}.weight"]))
    name = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return jnp.matmul(norm(x, model[f"{last}.weight"]), weights[name].T, precision=EXACT)


def embed(weights: Weights, tokens: jax.Array) -> jax.Array:
    """Embeddings of int32 `[tokens]`."""
    return weights["model.embed_tokens.weight"][tokens]


def attention(
    config: dict[str, Any],
    weights: Weights,
    x: jax.Array,
    cached: Cached,
    layer: int,
    turn: Rotary | None,
    **settings: Any,
) -> jax.Array:
    """Grouped attention of `q_proj`, `k_proj`, `v_proj` and `o_proj`, over what is cached."""
    query, key, value = heads(config, weights, x)
    if turn is not None:
        query, key = turn(query), turn(key)
    found = cached.attend(layer, query, {"key": key, "value": value}, **settings)
    return linear(found.reshape(len(x), -1), weights, "o_proj")


def heads(config: dict[str, Any], weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value, `[tokens, heads, elements]`."""
    split = (x.shape[0], -1, config["head_dim"])
    query, key, value = (linear(x, weights, f"{name}_proj").reshape(split) for name in "qkv")
    return query, key, value

"""Llama: full attention with grouped heads, and a gated MLP."""

from __future__ import annotations

import functools
from typing import Any

import jax

from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights
from examples.serve.families.decoder import attention, decoder, embed
from examples.serve.layers import gated_mlp, rms_norm, rotary


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, float32 `[tokens, vocabulary]`.

    Args:
      config: the checkpoint's.
      weights: the checkpoint's.
      tokens: int32 `[tokens]`.
      positions: int32 `[tokens]`.
      cached: attention over what is cached.
    """
    turn = rotary(config["rope_parameters"], config["head_dim"], positions)

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        return attention(config, own.below("self_attn."), x, cached, layer, turn)

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        return gated_mlp(own.below("mlp."), x)

    norm = functools.partial(rms_norm, epsilon=config["rms_norm_eps"])
    return decoder(config, weights, embed(weights, tokens), mixer, feed_forward, norm)

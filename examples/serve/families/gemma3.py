"""Gemma 3: five windows to one layer of full attention, norms before and after, norms of queries and keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights
from examples.serve.families.decoder import decoder, embed, heads
from examples.serve.layers import gated_mlp, linear, rms_norm, rotary


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    kinds = config["layer_types"]
    turns = {kind: rotary(config["rope_parameters"][kind], config["head_dim"], positions) for kind in set(kinds)}
    scale = config["query_pre_attn_scalar"] ** -0.5

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, 1 + weight, config["rms_norm_eps"])

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        mine, turn = own.below("self_attn."), turns[kinds[layer]]
        query, key, value = heads(config, mine, x)
        query, key = turn(norm(query, mine["q_norm.weight"])), turn(norm(key, mine["k_norm.weight"]))
        found = cached.attend(layer, query, {"key": key, "value": value}, scale=scale)
        return norm(linear(found.reshape(len(x), -1), mine, "o_proj"), own["post_attention_layernorm.weight"])

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        found = gated_mlp(own.below("mlp."), x, functools.partial(jax.nn.gelu, approximate=True))
        return norm(found, own["post_feedforward_layernorm.weight"])

    x = embed(weights, tokens) * jnp.sqrt(jnp.float32(config["hidden_size"]))
    names = ("input_layernorm", "pre_feedforward_layernorm", "norm")
    return decoder(config, weights, x, mixer, feed_forward, norm, names)

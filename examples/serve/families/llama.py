"""Llama: full attention with grouped heads, and a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.checkpoint import Weights
from examples.serve.layers import EXACT, linear, rms_norm, rotary

Attend = Callable[..., jax.Array]
"""`attend(layer, query, key, value, **settings)`: writes keys and values of a layer, and attends to what is cached.

What a query sees is not said: the layer's kind is in the plan.
"""


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, attend: Attend) -> Any:
    """Logits of every token, float32 `[tokens, vocabulary]`.

    Args:
      config: the checkpoint's.
      weights: the checkpoint's.
      tokens: int32 `[tokens]`.
      positions: int32 `[tokens]`.
      attend: attention over what is cached.
    """
    model, epsilon = weights.below("model."), config["rms_norm_eps"]
    turn = rotary(config["rope_parameters"], config["head_dim"]).turn
    x = model["embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = model.below(f"layers.{layer}.")
        y = rms_norm(x, own["input_layernorm.weight"], epsilon)
        query, key, value = heads(config, own.below("self_attn."), y)
        found = attend(layer, turn(query, positions), turn(key, positions), value)
        x = x + linear(found.reshape(len(tokens), -1), own, "self_attn.o_proj")
        y = rms_norm(x, own["post_attention_layernorm.weight"], epsilon)
        gated = jax.nn.silu(linear(y, own, "mlp.gate_proj")) * linear(y, own, "mlp.up_proj")
        x = x + linear(gated, own, "mlp.down_proj")
    x = rms_norm(x, model["norm.weight"], epsilon)
    return head(config, weights, x)


def heads(config: dict[str, Any], weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value, `[tokens, heads, elements]`."""
    split = (x.shape[0], -1, config["head_dim"])
    query, key, value = (linear(x, weights, f"{name}_proj").reshape(split) for name in "qkv")
    return query, key, value


def head(config: dict[str, Any], weights: Weights, x: jax.Array) -> jax.Array:
    """Logits: by the embeddings where they are tied, else by a head of their own."""
    name = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return jnp.matmul(x, weights[name].T, precision=EXACT)

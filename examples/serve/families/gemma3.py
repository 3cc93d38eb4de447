"""Gemma 3: five windows to one layer of full attention, norms before and after, norms of queries and keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.checkpoint import Weights
from examples.serve.families.llama import Attend, head, heads
from examples.serve.layers import linear, rms_norm, rotary


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, attend: Attend) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    model = weights.below("model.")
    kinds = config["layer_types"]
    turns = {kind: rotary(config["rope_parameters"][kind], config["head_dim"]).turn for kind in set(kinds)}
    scale = config["query_pre_attn_scalar"] ** -0.5

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, 1 + weight, config["rms_norm_eps"])

    x = model["embed_tokens.weight"][tokens] * jnp.sqrt(jnp.float32(config["hidden_size"]))
    for layer, kind in enumerate(kinds):
        own = model.below(f"layers.{layer}.")
        y = norm(x, own["input_layernorm.weight"])
        query, key, value = heads(config, own.below("self_attn."), y)
        query, key = norm(query, own["self_attn.q_norm.weight"]), norm(key, own["self_attn.k_norm.weight"])
        found = attend(layer, turns[kind](query, positions), turns[kind](key, positions), value, scale=scale)
        y = linear(found.reshape(len(tokens), -1), own, "self_attn.o_proj")
        x = x + norm(y, own["post_attention_layernorm.weight"])
        y = norm(x, own["pre_feedforward_layernorm.weight"])
        gated = jax.nn.gelu(linear(y, own, "mlp.gate_proj"), approximate=True) * linear(y, own, "mlp.up_proj")
        x = x + norm(linear(gated, own, "mlp.down_proj"), own["post_feedforward_layernorm.weight"])
    return head(config, weights, norm(x, model["norm.weight"]))

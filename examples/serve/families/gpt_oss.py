"""gpt-oss: every other layer a window, a sink a head in every softmax, and experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.checkpoint import Weights
from examples.serve.families.llama import Attend, head, heads
from examples.serve.layers import EXACT, linear, rms_norm, rotary

ALPHA = 1.702


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, attend: Attend) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    model, epsilon = weights.below("model."), config["rms_norm_eps"]
    turn = rotary(config["rope_parameters"], config["head_dim"]).turn
    x = model["embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = model.below(f"layers.{layer}.")
        y = rms_norm(x, own["input_layernorm.weight"], epsilon)
        query, key, value = heads(config, own.below("self_attn."), y)
        sinks = own["self_attn.sinks"]
        found = attend(layer, turn(query, positions), turn(key, positions), value, sinks=sinks)
        x = x + linear(found.reshape(len(tokens), -1), own, "self_attn.o_proj")
        y = rms_norm(x, own["post_attention_layernorm.weight"], epsilon)
        x = x + _experts(config, own.below("mlp."), y)
    return head(config, weights, rms_norm(x, model["norm.weight"], epsilon))


def _experts(config: dict[str, Any], weights: Weights, x: jax.Array) -> jax.Array:
    """The best experts of each token, weighted; every expert computes every token, as this is an example."""
    scores, chosen = jax.lax.top_k(linear(x, weights, "router"), config["num_experts_per_tok"])
    shares = jax.nn.softmax(scores, axis=-1)
    share = jnp.zeros((x.shape[0], config["num_local_experts"])).at[jnp.arange(x.shape[0])[:, None], chosen].set(shares)
    both = jnp.einsum("td,edf->tef", x, weights["experts.gate_up_proj"], precision=EXACT)
    both = both + weights["experts.gate_up_proj_bias"]
    gate, up = both[..., ::2], both[..., 1::2]
    limit = config["swiglu_limit"]
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    inner = (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
    found = jnp.einsum("tef,efd->ted", inner, weights["experts.down_proj"], precision=EXACT)
    return jnp.einsum("te,ted->td", share, found + weights["experts.down_proj_bias"], precision=EXACT)

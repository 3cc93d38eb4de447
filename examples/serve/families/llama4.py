"""Llama 4: chunks with rotary positions, full attention without, experts whose inputs are scaled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights
from examples.serve.families.decoder import decoder, embed, heads
from examples.serve.families.experts import best, shares
from examples.serve.layers import EXACT, gated_mlp, halves, linear, rms_norm, rotary


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    turn = rotary(config["rope_parameters"], config["head_dim"], positions)
    epsilon = config["rms_norm_eps"]
    steps = jnp.floor((positions + 1) / config["floor_scale"])
    temperature = (jnp.log1p(steps) * config["attn_scale"] + 1)[:, None, None]

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        own = own.below("self_attn.")
        query, key, value = heads(config, own, x)
        if config["no_rope_layers"][layer]:  # where a layer has rotary positions, despite the name
            query, key = (rms_norm(turn(halves(part)), jnp.float32(1), epsilon) for part in (query, key))
        else:
            query = query * temperature
        found = cached.attend(layer, query, {"key": key, "value": value})
        return linear(found.reshape(len(x), -1), own, "o_proj")

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        own = own.below("feed_forward.")
        if layer not in config["moe_layers"]:
            return gated_mlp(own, x)
        return _experts(config, own, x) + gated_mlp(own.below("shared_expert."), x)

    norm = functools.partial(rms_norm, epsilon=epsilon)
    return decoder(config, weights, embed(weights, tokens), mixer, feed_forward, norm)


def _experts(config: dict[str, Any], weights: Weights, x: jax.Array) -> jax.Array:
    scores, chosen = best(linear(x, weights, "router"), config["num_experts_per_tok"])
    share = shares(chosen, jax.nn.sigmoid(scores), config["num_local_experts"])
    scaled = share[..., None] * x[:, None]
    both = jnp.einsum("ted,edf->tef", scaled, weights["experts.gate_up_proj"], precision=EXACT)
    gate, up = jnp.split(both, 2, axis=-1)
    return jnp.einsum("tef,efd->td", jax.nn.silu(gate) * up, weights["experts.down_proj"], precision=EXACT)

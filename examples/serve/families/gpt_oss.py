"""gpt-oss: every other layer a window, a sink a head in every softmax, and experts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights
from examples.serve.families.decoder import attention, decoder, embed
from examples.serve.families.experts import best, shares
from examples.serve.layers import EXACT, linear, rms_norm, rotary

ALPHA = 1.702


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    turn = rotary(config["rope_parameters"], config["head_dim"], positions)

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        own = own.below("self_attn.")
        return attention(config, own, x, cached, layer, turn, sinks=own["sinks"])

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        return _experts(config, own.below("mlp."), x)

    norm = functools.partial(rms_norm, epsilon=config["rms_norm_eps"])
    return decoder(config, weights, embed(weights, tokens), mixer, feed_forward, norm)


def _experts(config: dict[str, Any], weights: Weights, x: jax.Array) -> jax.Array:
    scores, chosen = best(linear(x, weights, "router"), config["num_experts_per_tok"])
    share = shares(chosen, jax.nn.softmax(scores, axis=-1), config["num_local_experts"])
    both = jnp.einsum("td,edf->tef", x, weights["experts.gate_up_proj"], precision=EXACT)
    both = both + weights["experts.gate_up_proj_bias"]
    gate, up = both[..., ::2], both[..., 1::2]
    limit = config["swiglu_limit"]
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    inner = (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
    found = jnp.einsum("tef,efd->ted", inner, weights["experts.down_proj"], precision=EXACT)
    return jnp.einsum("te,ted->td", share, found + weights["experts.down_proj_bias"], precision=EXACT)

"""Jamba: Mamba layers, some of full attention without positions, and experts in some layers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached, State
from examples.serve.checkpoint import Weights
from examples.serve.families.convolution import convolve
from examples.serve.families.decoder import attention, decoder, embed
from examples.serve.families.experts import best, mixture, shares
from examples.serve.layers import EXACT, gated_mlp, linear, rms_norm


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    sized = {"head_dim": config["hidden_size"] // config["num_attention_heads"], **config}

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        if layer % config["attn_layer_period"] == config["attn_layer_offset"]:
            return attention(sized, own.below("self_attn."), x, cached, layer, None)
        return _mamba(config, own.below("mamba."), x, cached, layer)

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        own = own.below("feed_forward.")
        if layer % config["expert_layer_period"] != config["expert_layer_offset"]:
            return gated_mlp(own, x)
        found, chosen = best(jax.nn.softmax(linear(x, own, "router"), axis=-1), config["num_experts_per_tok"])
        return mixture(own.below("experts."), x, shares(chosen, found, config["num_experts"]))

    norm = functools.partial(rms_norm, epsilon=config["rms_norm_eps"])
    names = ("input_layernorm", "pre_ff_layernorm", "final_layernorm")
    return decoder(config, weights, embed(weights, tokens), mixer, feed_forward, norm, names)


def _mamba(config: dict[str, Any], weights: Weights, x: jax.Array, cached: Cached, layer: int) -> jax.Array:
    """A state of some elements for each channel, whose step sizes, inputs and outputs follow from the token."""
    rank, size, epsilon = config["mamba_dt_rank"], config["mamba_d_state"], config["rms_norm_eps"]
    channels, gate = jnp.split(linear(x, weights, "in_proj"), 2, axis=-1)
    rate = -jnp.exp(weights["A_log"])

    def step(state: State, new: jax.Array) -> tuple[State, jax.Array]:
        past, inner = convolve(weights, state["state0"], new)
        parts = jnp.split(linear(inner, weights, "x_proj"), [rank, rank + size])
        normed = (
            rms_norm(part, weights[f"{name}_layernorm.weight"], epsilon)
            for name, part in zip(("dt", "b", "c"), parts, strict=True)
        )
        time, taken, said = normed
        time = jax.nn.softplus(linear(time, weights, "dt_proj"))[:, None]
        memory = jnp.exp(rate * time) * state["state1"] + time * taken * inner[:, None]
        found = jnp.matmul(memory, said, precision=EXACT) + inner * weights["D"]
        return {"state0": past, "state1": memory}, found

    return linear(cached.recur(layer, step, channels) * jax.nn.silu(gate), weights, "out_proj")

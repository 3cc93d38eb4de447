"""Qwen3-Next: gated delta nets and gated attention, routed experts and a shared one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached, State
from examples.serve.checkpoint import Weights
from examples.serve.families.convolution import convolve
from examples.serve.families.decoder import decoder, embed
from examples.serve.families.experts import best, mixture, shares
from examples.serve.layers import EXACT, Rotary, gated_mlp, linear, rms_norm, rotary


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    turn = rotary(config["rope_parameters"], config["head_dim"], positions)

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        if config["layer_types"][layer] == "full_attention":
            return _gated_attention(config, own.below("self_attn."), x, cached, layer, turn)
        return _delta_net(config, own.below("linear_attn."), x, cached, layer)

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        own = own.below("mlp.")
        if layer in config["mlp_only_layers"]:
            return gated_mlp(own, x)
        found, chosen = best(jax.nn.softmax(linear(x, own, "gate"), axis=-1), config["num_experts_per_tok"])
        if config["norm_topk_prob"]:
            found = found / found.sum(axis=-1, keepdims=True)
        share = shares(chosen, found, config["num_experts"])
        shared = jax.nn.sigmoid(linear(x, own, "shared_expert_gate")) * gated_mlp(own.below("shared_expert."), x)
        return mixture(own.below("experts."), x, share) + shared

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return _norm(config, x, weight)

    return decoder(config, weights, embed(weights, tokens), mixer, feed_forward, norm)


def _norm(config: dict[str, Any], x: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x, 1 + weight, config["rms_norm_eps"])


def _gated_attention(
    config: dict[str, Any], weights: Weights, x: jax.Array, cached: Cached, layer: int, turn: Rotary
) -> jax.Array:
    """Attention whose output a gate of each element scales; a head's query and gate lie together."""
    split = (len(x), -1, config["head_dim"])
    both = linear(x, weights, "q_proj").reshape(len(x), config["num_attention_heads"], -1)
    query, gate = jnp.split(both, 2, axis=-1)
    key, value = (linear(x, weights, f"{name}_proj").reshape(split) for name in "kv")
    query, key = (
        turn(_norm(config, heads, weights[f"{name}_norm.weight"])) for name, heads in (("q", query), ("k", key))
    )
    found = cached.attend(layer, query, {"key": key, "value": value}) * jax.nn.sigmoid(gate)
    return linear(found.reshape(len(x), -1), weights, "o_proj")


def _delta_net(config: dict[str, Any], weights: Weights, x: jax.Array, cached: Cached, layer: int) -> jax.Array:
    """The gated delta rule: a state `[value heads, value elements, key elements]` that forgets, and learns errors."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    shared = values // keys
    mixed = linear(x, weights, "in_proj_qkvz").reshape(len(x), keys, -1)
    inner = shared * value_size
    query, key, value, gate = jnp.split(mixed, [key_size, 2 * key_size, 2 * key_size + inner], axis=-1)
    learn, forget = jnp.split(linear(x, weights, "in_proj_ba").reshape(len(x), keys, -1), 2, axis=-1)
    decay = -jnp.exp(weights["A_log"]) * jax.nn.softplus(forget.reshape(len(x), values) + weights["dt_bias"])
    channels = jnp.concatenate([part.reshape(len(x), -1) for part in (query, key, value)], axis=-1)

    def step(state: State, token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[State, jax.Array]:
        new, learned, kept = token
        past, convolved = convolve(weights, state["state0"], new)
        query, key, value = jnp.split(convolved, [keys * key_size, 2 * keys * key_size])
        query, key = (jnp.repeat(_unit(part.reshape(keys, key_size)), shared, axis=0) for part in (query, key))
        memory = state["state1"] * kept[:, None, None]
        error = value.reshape(values, value_size) - jnp.einsum("hvk,hk->hv", memory, key, precision=EXACT)
        memory = memory + learned[:, None, None] * error[..., None] * key[:, None]
        found = jnp.einsum("hvk,hk->hv", memory, query, precision=EXACT) * key_size**-0.5
        return {"state0": past, "state1": memory}, found

    tokens = channels, jax.nn.sigmoid(learn.reshape(len(x), values)), jnp.exp(decay)
    found = rms_norm(cached.recur(layer, step, tokens), weights["norm.weight"], config["rms_norm_eps"])
    found = found * jax.nn.silu(gate.reshape(found.shape))
    return linear(found.reshape(len(x), -1), weights, "out_proj")


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
